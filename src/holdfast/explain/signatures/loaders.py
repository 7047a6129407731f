"""Signatures of loaders set up wrongly: what cannot be sent to workers, options that contradict, datasets unfit.

Read through ``loading``. Does not match anything.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

_PROCESSES: tuple[Signature, ...] = (
    Signature(
        id="H940",
        title="something that cannot be pickled has to go to another process",
        family="loader",
        rank=50,
        exceptions=("AttributeError", "PicklingError", "TypeError", "MaybeEncodingError", "RuntimeError"),
        frames=(r"multiprocessing[/\\]", r"reduction\.py:", r"popen_\w+\.py:", r"concurrent[/\\]futures[/\\]process"),
        patterns=(
            r"Can't (?:get|pickle) local object '",
            r"Can't pickle <[^>\n]{1,200}>[^\n]{0,80}: (?:attribute lookup|it's not)",
            r"cannot pickle '[\w.]+' objects?",
            r"can't pickle [\w.]+ objects",
            r"Error sending result: '",
            r"h5py objects cannot be pickled",
        ),
        means="With spawn or forkserver the dataset, collate function and worker_init_fn are pickled; results always "
        "are. Lambdas, local classes, open files, locks, generators and database handles cannot be.",
        fix="Move functions and classes to the top of a module (functools.partial instead of a lambda). Open files "
        "and connections in the worker, at first use.",
        example="Traceback (most recent call last):\n  File "
        '"/usr/lib/python3.11/multiprocessing/reduction.py", line 60, in dump\n'
        "AttributeError: Can't pickle local object 'lambda_collate_under_spawn.<locals>.<lambda>'",
        seen="reproduced on torch 2.13; pytorch#142884",
        also={"Python 3.6": "TypeError: can't pickle _thread.lock objects"},
    ),
    Signature(
        id="H1223",
        title="a tensor of a graph has to go to another process",
        family="loader",
        rank=49,
        patterns=(r"Cowardly refusing to serialize non-leaf tensor which requires_grad",),
        means="A dataset or worker returns a tensor that was computed with gradients. It cannot cross processes; in "
        "a worker the error is only printed, and the trainer waits for ever.",
        fix="Return tensor.detach(), or compute under torch.no_grad() in the dataset.",
        example="RuntimeError: Cowardly refusing to serialize non-leaf tensor which requires_grad, since "
        "autograd does not support crossing process boundaries.  If you just want to transfer the data, "
        "call detach() on the tensor before serializing (e.g., putting it on the queue).",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H941",
        title="the script starts processes without a main guard",
        family="user code",
        rank=48,
        patterns=(r"An attempt has been made to start a new process before the",),
        means="A spawned process imports the main module again. The script makes its loader or processes at top "
        "level, so each new process would start more.",
        fix="Put the program into a function and call it under `if __name__ == '__main__':`.",
        example="RuntimeError: An attempt has been made to start a new process before the\n        current "
        "process has finished its bootstrapping phase.\n\n        This probably means that you are not "
        "using fork to start your\n        child processes and you have forgotten to use the proper "
        "idiom\n        in the main module:\n\n            if __name__ == '__main__':\n                "
        'freeze_support()\n                ...\n\n        The "freeze_support()" line can be omitted '
        "if the program\n        is not going to be frozen to produce an executable.\n\n        To fix "
        'this issue, refer to the "Safe importing of main module"\n        section in '
        "https://docs.python.org/3/library/multiprocessing.html",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1224",
        title="a process that was being started ended before it was handed its work",
        family="loader",
        role="cascade",
        rank=49,
        patterns=(),
        in_frames=((r"\[Errno 32\] Broken pipe", r"[/\\]reduction\.py:dump$|popen_spawn_\w+\.py:__init__$"),),
        exceptions=("BrokenPipeError",),
        only_exceptions=True,
        means="The parent wrote the pickled work into a pipe whose reader had ended: the new process failed while it "
        "imported the main module, and said so itself.",
        fix="Read the error of the child above or below this one; without one, run the import of the main module "
        "alone. Mostly a missing `if __name__ == '__main__':`.",
        example='Traceback (most recent call last):\n  File "train.py", line 60, in <module>\n  File '
        '"/usr/lib/python3.11/multiprocessing/reduction.py", line 60, in dump\nBrokenPipeError: [Errno 32] '
        "Broken pipe",
        seen="pytorch#31465",
    ),
    Signature(
        id="H1215",
        title="a spawned process cannot find a class or function of the main module",
        family="user code",
        rank=58,
        only_exceptions=True,
        exceptions=("AttributeError",),
        frames=(r"multiprocessing[/\\](?:spawn|queues|pool|forkserver)\.py:",),
        patterns=(r"Can't get attribute '[\w.<>]+' on <module '__(?:mp_)?main__'",),
        means="The spawned process unpickles by importing the main module, and there the name is not defined: it "
        "was typed in a notebook or prompt, or defined under the main guard.",
        fix="Move the class or function into a module file and import it.",
        example="Traceback (most recent call last):\n  File "
        '"/usr/lib/python3.11/multiprocessing/spawn.py", line 132, in _main\n'
        "AttributeError: Can't get attribute 'Numbers' on <module '__main__' (built-in)>",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1212",
        title="a loader is used in a process that did not make it",
        family="loader",
        rank=60,
        patterns=(r"can only (?:test|join) a child process",),
        means="An iterator with workers was made before a fork and is used or cleaned up in the child, which is not "
        "the parent of the workers. Often it is only noise of a destructor.",
        fix="Make loaders after the fork. If the text stands under 'Exception ignored in' and training goes on, "
        "ignore it.",
        false_positives="'Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__' is harmless.",
        example="AssertionError: can only join a child process",
        seen="reproduced on torch 2.13",
        also={
            "with other wording": "AssertionError: can only test a child process",
        },
    ),
    Signature(
        id="H1213",
        title="a daemonic process may not start loader workers",
        family="loader",
        rank=50,
        patterns=(r"daemonic processes are not allowed to have children",),
        means="A DataLoader with workers is made inside a worker of another loader or of a multiprocessing.Pool; "
        "those are daemons.",
        fix="Use num_workers=0 for the inner loader, or a process with daemon=False "
        "(concurrent.futures.ProcessPoolExecutor) for the outer one.",
        example="AssertionError: daemonic processes are not allowed to have children",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1214",
        title="the start method of processes was set too late or twice",
        family="user code",
        patterns=(r"context has already been set",),
        exceptions=("RuntimeError",),
        only_exceptions=True,
        means="set_start_method may be called once, before anything uses multiprocessing; a library did so already.",
        fix="Call it first under the main guard, or pass multiprocessing_context=... to the DataLoader instead.",
        example="Traceback (most recent call last):\n  File "
        '"/usr/lib/python3.11/multiprocessing/context.py", line 247, in '
        "set_start_method\n"
        "RuntimeError: context has already been set",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H947",
        title="tokenizer threads were running when workers were forked",
        family="loader",
        role="confirmation",
        patterns=(
            r"The current process just got forked, after parallelism has already been used\. Disabling parallelism",
        ),
        means="The tokenizer had used its threads before the fork. It turns them off in the children; with other "
        "libraries the same situation is a deadlock.",
        fix="Set TOKENIZERS_PARALLELISM=false, or tokenise before training.",
        false_positives="It is a warning: training goes on, only slower.",
        example="huggingface/tokenizers: The current process just got forked, after parallelism has already been "
        "used. Disabling parallelism to avoid deadlocks...",
        seen="huggingface/tokenizers, printed to stderr; not installed here, not reproduced",
    ),
)

_OPTIONS: tuple[Signature, ...] = (
    Signature(
        id="H1203",
        title="options of the DataLoader contradict each other or are out of range",
        family="user code",
        patterns=(
            r"prefetch_factor option (?:could only be specified in multiprocessing|should be non-negative)",
            r"persistent_workers option needs num_workers > 0",
            r"(?:num_workers|timeout) option should be non-negative",
            r"(?:batch_sampler|sampler) option is mutually exclusive with",
            r"batch_size=None option disables auto-batching",
            r"batch_size should be a positive integer value, but got batch_size=",
            r"multiprocessing_context (?:option should|can only be used with multi-process loading)",
            r"(?:drop_last|replacement) should be a boolean value, but got",
            r"attribute should not be set after \w+ is initialized",
        ),
        means="The DataLoader was given options that do not go together, or a size that is no positive whole number.",
        fix="Do as the message says. A batch size that comes out of a division needs // and must not be 0; "
        "prefetch_factor and persistent_workers need num_workers > 0.",
        example="ValueError: batch_size should be a positive integer value, but got batch_size=16.0",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1204",
        title="an IterableDataset cannot be shuffled or sampled",
        family="user code",
        patterns=(r"DataLoader with IterableDataset: expected unspecified (?:shuffle|sampler|batch_sampler) option",),
        means="An IterableDataset decides its order itself; the DataLoader has no indices to shuffle.",
        fix="Drop shuffle and sampler, and shuffle inside the dataset: its shards, and a buffer of samples.",
        example="ValueError: DataLoader with IterableDataset: expected unspecified shuffle option, but got "
        "shuffle=True",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1205",
        title="the dataset has no length",
        family="user code",
        only_exceptions=True,
        exceptions=("TypeError",),
        frames=(r"torch[/\\]utils[/\\]data[/\\]",),
        patterns=(r"object of type '\w+' has no len\(\)",),
        means="Shuffling, splitting and len(loader) need the number of samples, and the dataset has no __len__: it "
        "is a stream, or the method is missing.",
        fix="Define __len__. For a stream give the scheduler and the progress bar a number of steps instead.",
        example="Traceback (most recent call last):\n  File "
        '"/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 541, in __len__\n'
        "TypeError: object of type 'Lines' has no len()",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1206",
        title="the dataset does not define how to get a sample",
        family="user code",
        rank=84,  # without frames behind the generic signature of wrong operations
        only_exceptions=True,
        frames=(r"torch[/\\]utils[/\\]data[/\\](?:dataset|_utils[/\\]fetch)\.py:",),
        exceptions=("NotImplementedError", "TypeError"),
        patterns=(
            r"'(?!NoneType|int|float|str|bool|list|dict|tuple|set|function|method)\w+' object is not subscriptable",
            r"Subclasses of (?:Iterable)?Dataset should implement __(?:getitem|iter)__",
            r"overrides __getitem__ but not __getitems__",
        ),
        means="The class derives from Dataset, but __getitem__ is missing, misspelt or indented into another one.",
        fix="Define __getitem__(self, index) at the level of the class.",
        example="NotImplementedError: Subclasses of Dataset should implement __getitem__.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1207",
        title="a loader is used as a list or as an iterator",
        family="user code",
        patterns=(
            r"'DataLoader' object is not (?:subscriptable|an iterator)",
            r"'_(?:SingleProcess|MultiProcessing)DataLoaderIter' object has no attribute '(?:next|__next__)'",
            r"'DataLoader' object has no attribute '(?:next|__next__|shape|size|to|cuda)'",
        ),
        means="A DataLoader is an iterable: it cannot be indexed, next() needs iter() first, and its iterator has no "
        "method .next() any more (since torch 1.13).",
        fix="Write `batches = iter(loader)` and `next(batches)`. For one sample index the dataset.",
        example="AttributeError: '_SingleProcessDataLoaderIter' object has no attribute 'next'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1208",
        title="the parts of a split do not add up to the dataset",
        family="user code",
        patterns=(
            r"Sum of input lengths does not equal the length of the input dataset",
            r"Fraction at index \d+ is not between 0 and 1",
        ),
        means="random_split wants lengths that add up exactly, or fractions that add up to 1. int(0.8 * n) and "
        "int(0.2 * n) mostly leave one sample over.",
        fix="Give fractions, random_split(data, [0.8, 0.2]), or compute the last length as what remains.",
        example="ValueError: Sum of input lengths does not equal the length of the input dataset!",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1209",
        title="features and labels are not equally many",
        family="user code",
        patterns=(r"Size mismatch between (?:tensors|datasets)", r"Nested dataset's output size mismatch"),
        exceptions=("AssertionError", "ValueError"),
        means="TensorDataset or StackDataset joins things sample by sample, and they differ in their first size.",
        fix="Print the lengths. Mostly rows were dropped in one only, or one is transposed.",
        example="AssertionError: Size mismatch between tensors",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H945",
        title="the dataset is empty",
        family="user code",
        rank=55,
        patterns=(
            r"num_samples should be a positive integer value, but got num_samples=0(?!\.?\d)",
            r"datasets should not be an empty iterable",
        ),
        means="The loader shuffles a dataset of length 0: no file matched the pattern, the path is another one, or a "
        "filter dropped everything.",
        fix="Print the path and len(dataset). Check the mount, the file ending, and the filter.",
        example="ValueError: num_samples should be a positive integer value, but got num_samples=0",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H946",
        title="the loader had no further batch: a stray StopIteration",
        family="loader",
        rank=65,
        only_exceptions=True,
        exceptions=("StopIteration",),
        patterns=(r"\A",),
        means="next() was called on an iterator at its end: fewer batches than steps, or none at all since drop_last "
        "left nothing. A StopIteration within __getitem__ silently ends an epoch, which shows only in its length.",
        fix="Loop with `for`, or start the iterator anew at its end. Compare len(dataset) with the batch size if "
        "drop_last=True. Never call next() without a default inside a dataset.",
        example="Traceback (most recent call last):\n  File "
        '"/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 715, in _next_index\n'
        "StopIteration",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1220",
        title="a generator met the end of another iterator",
        family="loader",
        rank=66,
        patterns=(r"\b(?:generator|coroutine) raised StopIteration",),
        means="next() within a generator reached the end of its source; Python turns that into a RuntimeError.",
        fix="Catch StopIteration in the generator and return, or loop with `for`.",
        example="RuntimeError: generator raised StopIteration",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1221",
        title="an IterableDataset yields more samples than its length says",
        family="loader",
        role="confirmation",
        patterns=(r"Length of IterableDataset .{1,300} was reported to be \d+",),
        means="The stream is not split between the workers, so that each yields everything, or __len__ is wrong.",
        fix="In __iter__ take every n-th sample by torch.utils.data.get_worker_info().",
        example="/app/train.py:9: UserWarning: Length of "
        "IterableDataset <__main__.Stream object at 0x7f2b1c0a3d90> was reported to be 10(when accessing "
        "len(dataloader)), but 11 samples have been fetched. ",
        seen="reproduced on torch 2.13, a warning only",
    ),
    Signature(
        id="H1216",
        title="DistributedSampler was given a rank outside its world",
        family="distributed",
        patterns=(r"Invalid rank -?\d+, rank should be in the interval \[0, -?\d+\]",),
        means="The rank given to the sampler is not below num_replicas: ranks counted from 1, or the number of "
        "processes of one node only.",
        fix="Count ranks from 0, and pass the world size as num_replicas; or pass neither after init_process_group.",
        example="ValueError: Invalid rank 2, rank should be in the interval [0, 1]",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1217",
        title="the weights of a weighted sampler do not fit",
        family="user code",
        patterns=(
            r"weights should be a 1d sequence but given weights have shape",
            r"number of categories cannot exceed 2\^24",
        ),
        means="WeightedRandomSampler needs one weight for each sample in one dimension, and torch.multinomial cannot "
        "draw from more than 2^24 of them.",
        fix="Flatten the weights. For larger datasets sample in two stages, a shard first, or use numpy's choice.",
        example="ValueError: weights should be a 1d sequence but given weights have shape (10, 1)",
        seen="reproduced on torch 2.13",
    ),
)

SIGNATURES: tuple[Signature, ...] = (*_PROCESSES, *_OPTIONS)
"""Every signature of how loaders are set up."""
