"""NumPy arrays as tensors on a GPU, and back."""


def to_gpu(x, device):
    """A tensor with the bits of a NumPy array."""
    import torch

    name = f"int{8 * x.dtype.itemsize}"
    bits = torch.from_numpy(x.view(name).copy()).to(f"cuda:{device}")
    return bits.view(getattr(torch, x.dtype.name))


def bits_of(tensor):
    """The elements of a tensor as integers, on the host."""
    import torch

    name = f"int{8 * tensor.element_size()}"
    return tensor.view(getattr(torch, name)).cpu().numpy()
