"""Commands that start runs through the launcher and judge what they leave behind."""
