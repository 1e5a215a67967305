"""Lets the ranks of a job find each other, share memory, and agree."""
