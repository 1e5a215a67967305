"""Device source to machine code at run time, and the cache of what was compiled."""
