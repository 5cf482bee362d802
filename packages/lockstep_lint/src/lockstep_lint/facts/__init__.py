"""What is read out of a program: its names and values, who runs a line, what is trained."""
