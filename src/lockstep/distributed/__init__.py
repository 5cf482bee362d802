"""Who runs where: launching, joining, and what a host offers."""
