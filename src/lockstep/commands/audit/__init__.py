"""`lockstep audit`: run a training script of anybody's on several numbers of processes, and say what it did.

plan.py      what a process of the user's is told
events.py    what it records
inside.py    runs the script in there, with everything installed
recorders/   each `install(plan)` patches torch and emits events
findings/    pure functions from the records of all N to findings
"""
