"""What a run tells: progress, journal, mirrors, alarms."""
