"""Checkpoints: written completely or not at all, verified when read, and free of executable code.

    saver.py       Saver, for coroutines: save, restore, verify
    policies.py    Checkpoint, which ones are kept, and the options of a mirror
    stateful.py    Stateful, and snapshots of states; RandomState
    _directory.py  CheckpointDirectory: what Saver does, in methods that block
    _remote.py     copies in another file system: made in the background, and restored from
    _files.py      an open directory and its files, and the lock
    _format.py     names and manifests; dtypes of arrays
    _encoding.py   a state to bytes and back
    _torch.py      tensors of PyTorch: copies, and memory as bytes

On disk:

    checkpoint_dir/
      .lock                          locked by the one writer; the kernel releases it when that ends
      step-000000001000.000007/      the checkpoint of step 1000, the seventh that was committed
                                     here
        arrays.safetensors           every array and tensor of the state
        state.msgpack                the tree that contains them, with everything else
        manifest.json                step, sequence, metrics; size and CRC-32 of the files; a sha256
                                     of itself
      .tmp-step-...                  being written or removed
      damaged-step-...               did not verify, set aside by `restore`

Words:

    sequence    the number of a checkpoint in the order of commits: the newest has the highest
    commit      the rename after which a directory is a checkpoint
    verify      compare a manifest, or the files that it lists, with the sizes and checksums
    set aside   rename a damaged checkpoint, so that it is neither restored nor lost
    interim     said of a checkpoint where a run has stopped, and no save was due
    mirror      a directory in another file system with copies of the checkpoints

A save writes all files into a `.tmp-` directory, syncs each file and then the directory, renames
it, syncs the parent, and only then removes old checkpoints. The newest checkpoint has the highest
sequence of all that verify. There is no pointer that could be wrong. The same state gives the same
bytes on every Python. There is no pickle.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohooks.checkpoint.policies import (
        Checkpoint,
        KeepBest,
        KeepNewest,
        KeepPolicy,
        Mirror,
        MirrorStatus,
        Restored,
    )
    from aiohooks.checkpoint.saver import Saver
    from aiohooks.checkpoint.stateful import RandomState, Stateful

__all__ = [
    "Checkpoint",
    "KeepBest",
    "KeepNewest",
    "KeepPolicy",
    "Mirror",
    "MirrorStatus",
    "RandomState",
    "Restored",
    "Saver",
    "Stateful",
]

# A session needs only the protocol of states, so the other modules are imported when they are used.
if not TYPE_CHECKING:
    from aiohooks._core.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "aiohooks.checkpoint.policies": (
                "Checkpoint",
                "KeepBest",
                "KeepNewest",
                "KeepPolicy",
                "Mirror",
                "MirrorStatus",
                "Restored",
            ),
            "aiohooks.checkpoint.saver": ("Saver",),
            "aiohooks.checkpoint.stateful": ("RandomState", "Stateful"),
        },
    )
    del lazy_names
