"""The rules, a file for each part of a script; importing them enters them in the list."""

from lockstep.commands.lint.rules import data as data
