"""What hfopt borrows from the inside of torch, transformers, accelerate, peft, typer: versions, private names, patches. One place for it.

`versions` says what is installed, `torch_patches` and `transformers_patches` hold what is changed in other packages and put back
afterwards, `fast_import` imports transformers sooner. tests/test_canaries.py names all that must stay as it is in those packages.
"""

from hfopt.compat.torch_patches import set_tf32, tf32_is_on
from hfopt.compat.transformers_patches import let_gradients_through, quietly
from hfopt.compat.versions import installed_torch, package_version

__all__ = ["installed_torch", "let_gradients_through", "package_version", "quietly", "set_tf32", "tf32_is_on"]
