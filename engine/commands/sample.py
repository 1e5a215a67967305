"""The text of which commands measure the perplexity. It must not change: perplexities of different
texts cannot be compared.
"""

SAMPLE = '''\
A ring is the simplest way to add up vectors that lie on several computers. Each computer has a
neighbour on the right. It cuts its vector into as many parts as there are computers, sends one part
to the right, and receives another from the left. It adds what it received to its own part and
passes the sum on. After one round less than there are computers, each of them holds one part of the
result, and a second journey around the ring brings all parts to all. Every link carries the same
number of bytes at the same time, so for long vectors no other way is faster. For short vectors it
is slow, because a message waits for the one before it at every step.

"""Statistics of numbers that come one after the other."""

import math


class Running:
    """The mean and the variance of all numbers so far, without keeping them."""

    def __init__(self):
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, value):
        """Takes a number into account."""
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._squares += delta * (value - self.mean)

    def variance(self):
        """Returns the variance; 0 if there are fewer than two numbers."""
        if self.count < 2:
            return 0.0
        return self._squares / (self.count - 1)

    def deviation(self):
        """Returns the standard deviation."""
        return math.sqrt(self.variance())


def mean(values):
    """Returns the mean of a list of numbers."""
    if not values:
        raise ValueError("there are no values")
    return sum(values) / len(values)
'''
