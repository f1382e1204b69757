"""Pipelines: tasks of every kind of model, with real batching.

    clf = hw.pipeline("text-classification", model="path-or-name")
    clf("great film")                      # a dict
    clf(["great film", "dull film"])       # a list of dicts
    for result in clf(stream): ...         # lazily, in order, in constant memory
    await clf.submit("great film")         # from many tasks, threads and event loops, batched together

How an item becomes a result, and the data type at each station (all in `task`, all plain values):

    item          what the user passes: a str, a dict, an image, a path, ...
      │  Task.preprocess(item, options) → PreparedItem        threads of the pool, ahead of the model
    PreparedItem  rows: tuple[Row, ...] that the model must compute for this item; facts: what postprocess will want
    Row           inputs: name → ids, array or tensor of one row, no batch dimension; length: its cost (tokens, …)
      │  Batcher: rows of all callers, of like length and equal `Task.batch_key(options)`, up to a budget
      │  Task.collate(rows) → Batch                           the batcher's thread, which alone uses the device
    Batch         inputs: name → tensor [R, …] (may be nested); rows
      │  Task.forward(batch, options) → name → tensor [R, …]  on the device, reduced to what postprocess needs
      │  one copy to the host, split by row
      │  Task.postprocess(prepared, results, options)         the caller's thread, or the pool's for `submit`
    result        what Hugging Face users expect of that task

`options` is a frozen dataclass, one type for each task (`Task.Options`): what a call may set. `results` has one
`dict[str, numpy.ndarray]` for each row of the item, in the order of its rows. A task never starts threads, never
batches, never moves tensors: it says what a row is and what its numbers mean. `Task.lookahead` bounds how many items
may be on their way (fewer where rows are large, such as images). A task whose model runs elsewhere overrides
`Task.open` and gives back an object with Pipeline's face.

Who owns what:

    make          `pipeline(...)`: its arguments; `opening` loads and chooses a way to compute; `registry` has the names
    pipeline      Pipeline: calls, streams, `submit`, `preprocess`/`forward`/`postprocess` by hand, closing
    batcher       the one thread that computes; `planning` chooses its rows, `budget` how many, `stream` keeps order
    task          Task and the types above;  `arrays` pads and stacks rows into batches
    forward       the model under eval, inference mode, dtype and device; arguments checked by inspection
    outputs       ModelOutput: attribute, item and tuple access; JSON and safetensors
    loading       model folders → module, tokenizer, processor (safetensors only, never remote code)
    text          str → token ids: limits, truncation, strides
    images        any image → a PIL image; `recipes` do what an image processor does, bit by bit
    sounds        any recording → float32 samples; `pieces` divide long ones
    shapes        tasks whose rows padding would change; `writing` what models write of images and recordings
    unpadded, quantize, compiled, onnx    other ways to compute the same numbers; `products` are their linear layers
    graphs        unpadded rows on a GPU: passes captured once and replayed; `collecting` holds the collector back there
    tasks/        one file a family of tasks: classification, zero_shot, tagging, filling, answering, embedding (text),
                  decoding (text on the engine); vision, zero_shot_image, multimodal, audio, speech, whisper, seq2seq
"""
