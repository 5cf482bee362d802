"""`lockstep predict`: what N processes would give, from short measurements and the alpha-beta model."""
