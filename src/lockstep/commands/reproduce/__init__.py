"""`lockstep reproduce`: the experiment of a training script of anybody's, written for Lockstep, with proof.

inside.py      runs the script in a process of its own, recorded
recorder.py    what is noted there: model, loss, steps, rates; loaders.py: samples and epochs
written.py     the notes as files
made.py        objects as Python: the calls that made them
source.py      what of the script's own text those need
experiment.py  the records of all ranks as one experiment
recipe.py      the experiment as a config; parts.py, program.py: and as Python, where flags can't say it
replay.py      the recorded samples through Lockstep's own step, from the recorded weights
way.py         all of it, one after the other; report.py: what is said of it
"""
