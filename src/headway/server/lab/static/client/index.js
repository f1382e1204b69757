// The public names of the package.
export { Chat } from "./chat.js";
export { Matrix } from "./codec.js";
export { Context } from "./context.js";
export { connect, Engine, Tokenizer } from "./engine.js";
export { ConnectionFailed, HeadwayError } from "./errors.js";
export { Execution, Forward, Output, ProbeHandle, SampleHandle } from "./forward.js";
export { Generation, Grammar, OwnLayers, PromptLookup, } from "./generation.js";
export { Mask } from "./masks.js";
export { Pages } from "./pages.js";
export { AttentionScores, Distribution, Entropy, Hidden, LogitLens, Logits, Logprob, Logprobs, Ranking } from "./probes.js";
export { Argmax, MinP, Multinomial, Sampling, TopK, TopKTopP, TopP, Typical } from "./samplers.js";
