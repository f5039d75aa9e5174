"""The commands of `aiohooks`, whose arguments and help are in `aiohooks.__main__`.

    run             start a function as a chief and its workers
    steps           show a run in a step store
    why             say why processes wait, and for whom

`checkpoints` is in `aiohooks.checkpoint`, whose files it shows. A command's module is imported when
it is called.
"""
