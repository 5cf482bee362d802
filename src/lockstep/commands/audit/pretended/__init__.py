"""GPUs that aren't there: what cuda.py puts in torch's places."""
