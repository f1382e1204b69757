"""Uploaded programs: who may run how many, what they print and send, and the routes of /v1/programs."""
