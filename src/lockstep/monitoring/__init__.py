"""What a run reports: progress, journal, mirrors of it, hangs, ranks that differ."""
