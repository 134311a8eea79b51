"""The layers that a rank holds, and their state.

model.py        all layers, those that are here and those that are not; blueprint.py: what the script builds them by,
                draws.py: and the generators that it draws from
slots.py        where modules keep parameters and buffers
script_model.py one that the script has built, which every rank holds whole; statistics.py: of its BatchNorms;
                attributes.py: what its loop sets on modules; other_values.py: what is in the place of its own
                while it is evaluated
sharded.py      one that torch has sharded; dtensors.py: a rank's part of what is divided among ranks
loss_scale.py   a gradient scaler's, for float16
state_shard.py  the state of one layer or tie, exactly
optimizers.py   several of a script's own as one; strides.py: how what they keep for a parameter lies in memory
nesting.py      dicts and lists of tensors, with others in their place; packing.py: as bytes, digested
sublayers.py    attention and feed-forward of its blocks
given.py        what a script hands over, checked
"""
