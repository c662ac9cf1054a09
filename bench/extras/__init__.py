"""Rooms that a sweep can do without; no other room imports them. May import run and all below."""
