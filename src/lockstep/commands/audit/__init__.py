"""`lockstep audit`: run a training script on several numbers of processes, and say what it did.

command.py, launch.py, starter.py  start the script, in a copy of its folder, with the plan of plan.py
inside.py, scratch.py, small.py, standins.py, pretended/, waiting.py  surround it there
events.py, recorders/  record what it does
records.py, findings/, faults.py, report.py  read the records and report on them
"""
