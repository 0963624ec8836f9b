"""What hfopt borrows from the inside of torch, transformers, accelerate, peft, typer: versions, private names, patches. One place for it.

`versions` says what is installed, `torch_patches` and `transformers_patches` hold what is changed in other packages and put back
afterwards, `fast_import` imports transformers sooner. tests/test_canaries.py names all that must stay as it is in those packages.
"""
