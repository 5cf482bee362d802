"""`lockstep preview`: what the network sees."""
