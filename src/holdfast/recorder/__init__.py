"""The black box: what happened lies in a file that outlives the process.

Standard library only, but for history.
"""
