"""A classifier of digits whose training can be made to get stuck in many ways, to see each of
them named.
"""
