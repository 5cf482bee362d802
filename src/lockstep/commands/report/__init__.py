"""`lockstep report`: a page of what runs did."""
