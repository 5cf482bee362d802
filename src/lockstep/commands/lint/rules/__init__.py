"""The rules, a file for each part of a script; importing them enters them in the list."""

from lockstep.commands.lint.rules import accumulation as accumulation
from lockstep.commands.lint.rules import backends as backends
from lockstep.commands.lint.rules import backward as backward
from lockstep.commands.lint.rules import data as data
from lockstep.commands.lint.rules import devices as devices
from lockstep.commands.lint.rules import evaluation as evaluation
from lockstep.commands.lint.rules import lifetime as lifetime
from lockstep.commands.lint.rules import loading as loading
from lockstep.commands.lint.rules import means as means
from lockstep.commands.lint.rules import meeting as meeting
from lockstep.commands.lint.rules import metrics as metrics
from lockstep.commands.lint.rules import modes as modes
from lockstep.commands.lint.rules import preparing as preparing
from lockstep.commands.lint.rules import rates as rates
from lockstep.commands.lint.rules import reading as reading
from lockstep.commands.lint.rules import reducing as reducing
from lockstep.commands.lint.rules import resuming as resuming
from lockstep.commands.lint.rules import saving as saving
from lockstep.commands.lint.rules import schedules as schedules
from lockstep.commands.lint.rules import seeds as seeds
from lockstep.commands.lint.rules import some_ranks as some_ranks
from lockstep.commands.lint.rules import starting as starting
from lockstep.commands.lint.rules import subsets as subsets
from lockstep.commands.lint.rules import unused as unused
from lockstep.commands.lint.rules import waiting as waiting
from lockstep.commands.lint.rules import wrapping as wrapping
