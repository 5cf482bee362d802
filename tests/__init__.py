import os

# As the command line has it, before torch is loaded. With libgomp's own, a step of two threads took 25 times as long
# beside anything else that computed, even at the lowest priority.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
