"""Pipelines: tasks for models other than decoders, with batching across all callers.

    clf = hw.pipeline("text-classification", model="path-or-name")
    clf("great film")                      # [{"label": ..., "score": ...}], as in transformers
    clf(["great film", "dull film"])       # a list of dicts
    for result in clf(stream): ...         # lazily, in order, in constant memory
    await clf.submit("great film")         # from many tasks, threads and event loops, batched together

How an item becomes a result, and the type at each step (all in `task`, all plain values):

    item          what the user passes: a str, a dict, an image, a path, ...
      │  Task.preprocess(item, options) → PreparedItem        thread pool, ahead of the model
    PreparedItem  rows: tuple[Row, ...] that the model must compute for this item; facts: for postprocess
    Row           inputs: name → ids, array or tensor of one row, no batch dimension; length: its cost (tokens, …)
      │  Batcher: rows of all callers with similar length and equal `Task.batch_key(options)`, up to a token budget
      │  Task.collate(rows) → ModelInputs                     the batcher's thread, which alone uses the device
    ModelInputs   inputs: name → tensor [R, …] (may be nested); rows
      │  Task.forward(batch, options) → name → tensor [R, …]  on the device, reduced to what postprocess needs
      │  one copy to the host, split by row
      │  Task.postprocess(prepared, results, options)         the caller's thread, or the pool's for `submit`
    result        the same as Hugging Face's pipeline returns

`options` is a frozen dataclass, one type for each task (`Task.Options`): the keywords of a call. `results` has one
`dict[str, numpy.ndarray]` for each row of the item, in the order of its rows. A task never starts threads, never
batches, never moves tensors: it defines the rows of its model and the meaning of its outputs. `Task.lookahead` limits
how many items of a stream are in progress (fewer where rows are large, such as images). A task whose model does not run
in transformers overrides `Task.open` and returns an object with Pipeline's interface.

Who owns what:

    factory       `pipeline(...)`: arguments, loading, choice of the backend;  registry: the names of tasks
    arguments     those of transformers' pipeline, in our words;  infer_task: the task of a model, from its config
    pipeline      Pipeline: calls, streams, `submit`, `preprocess`/`forward`/`postprocess` by hand, closing
    batcher       the one thread that computes;  row_queue: which rows are next;  token_budget: how many tokens
    stream        items of an iterable in order, read ahead
    task          Task and the types above
    outputs       ModelOutput: attribute, item and tuple access; JSON and safetensors
    inputs/       text, images, audio → rows;  arrays: rows ↔ tensors;  same_shape: tasks that padding would change
    backends/     loading; torch, compiled, onnx; unpadded (variable-length batches), cuda_graphs; quantize, linear
    generation/   parameters and calls of transformers' `generate`; the encoder-decoder pipeline;
                  decoders on the engine: causal (forward and generate by hand), decoder_options, decoder_model
    tasks/        one file per family of tasks
"""
