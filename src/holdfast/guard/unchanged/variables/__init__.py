"""The variables of the script: which ones are saved, and how they are saved and restored.

kinds           which kind a value has, and the saved form of each kind; read this first
writer          `VariableWriter` turns variables into values that a checkpoint can store
reader          `VariableReader` restores the variables, in place where possible
namespaces      the variables of the script, by the function or module that they belong to
large_data      recognizes data that need not be saved, because it has not changed
random_sources  the random generators and samplers of a loader

To save values of a new kind, add it to the docstring of ``kinds`` and to `kind_of`, and a method to
the writer and to the reader. Both have a table from kinds to methods.
"""
