"""`lockstep reproduce`: the experiment of a training script, written for Lockstep, with proof.

inside.py       runs the script in a process of its own, recorded
watching.py     where torch is watched; recorder.py, loaders.py: what is noted; notes.py: the notes as files
expressions.py  objects as Python: the calls that created them; source.py: what of the script's own text those need
experiment.py   the records of all ranks as one experiment
recipe.py       the experiment as a config; program.py: and as Python, where flags can't say it
replay.py       the recorded samples through Lockstep's own step, from the recorded weights
proof.py        all of it, one after the other; report.py: what is printed of it
"""
