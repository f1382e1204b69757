// The public names of the package.

export { Chat, type ChatOptions, type Part, type Tool, type ToolCall } from "./chat.js";
export { Matrix } from "./codec.js";
export { Context, type Adapter, type ContextState } from "./context.js";
export { connect, Engine, Tokenizer, type Config, type ConnectOptions, type ContextOptions, type EngineStats } from "./engine.js";
export { ConnectionFailed, HeadwayError } from "./errors.js";
export { Execution, Forward, Output, ProbeHandle, SampleHandle, type LogitMask, type PassStats } from "./forward.js";
export {
  Generation, Grammar, OwnLayers, PromptLookup,
  type BuiltinDrafter, type Constraint, type Continuation, type Drafter, type GenerateOptions, type Step,
} from "./generation.js";
export { Mask, type RuleFunction } from "./masks.js";
export { Pages, type PagesState } from "./pages.js";
export { AttentionScores, Distribution, Entropy, Hidden, LogitLens, Logits, Logprob, Logprobs, Ranking, type Probe, type Rank, type Ranked } from "./probes.js";
export { Argmax, MinP, Multinomial, Sampling, TopK, TopKTopP, TopP, Typical, type Sampler, type Seed } from "./samplers.js";
