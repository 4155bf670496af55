"""Modules that the tests bring as ``python:toy_models:...``."""

import torch


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        states = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        return {"logits": self.head(states.sum(1))}


def tokens():
    names = ("input_ids", "attention_mask")
    examples = {name: torch.ones(2, 5, dtype=torch.long) for name in names}
    return Tokens(), examples, {name: {1: "sequence"} for name in examples}


def nonsense():
    return "a module"


def broken():
    raise OSError("no weights here")


class Convolution(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Conv2d(1, 3, 5)

    def forward(self, image):
        return self.body(image).mean((2, 3))


def bounded():
    return Convolution(), {}, {"image": {2: torch.export.Dim("height", min=6)}}


def unbounded():
    return Convolution(), {}, {"image": {2: "height"}}


class Values(torch.nn.Module):
    def forward(self, image):
        return torch.linalg.svdvals(image.flatten(2))


def unsupported():
    return Values()


class Branching(torch.nn.Module):
    def forward(self, image):
        return image if image.sum() > 0 else -image


def branching():
    return Branching()
