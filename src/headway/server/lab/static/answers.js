// The teacher's own answers, composed from the numbers on the page and the glossary: nothing here is generated.
//
// A question's subjects are found by its words. Each subject has its glossary entry and sentences with the current
// figures filled in. `seen` is what is on the screen: {source, trace, row, past, params, bias, seed, result, text}.

import { fixed, many, percent, whole } from "./dom.js";
import { distribution, draw, entropyOf, OFF, probAt, softmax, stages } from "./sampling.js";
import { TERMS } from "./words.js";

const MEANING = new Map(TERMS);
const MOST = 3; // subjects of one answer
const LIKELY = 300; // tokens that a question may name without quotation marks
const HEAT = "(?:temperature|\\bt)";

const quoted = (text) => `“${text.replaceAll("\n", "↵")}”`;
const named = (seen, id) => quoted(seen.text(id));
const nats = (value) => `${value.toFixed(2)} nats`;

/** The number that follows a word of the question ("top-p 0.5", "temperature of 1.5") if it `fits`. */
function numberAfter(question, word, fits) {
  const found = question.match(new RegExp(`${word}\\s*(?:=|of|is|to|at)?\\s*(\\d+(?:\\.\\d+)?|\\.\\d+)\\s*(%?)`));
  const value = found ? Number(found[1]) / (found[2] ? 100 : 1) : NaN;
  return fits(value) ? value : null;
}

/** The stages with one filter on, at the temperature of the screen. */
const only = (seen, change) => stages(seen.row, { ...OFF, temperature: seen.params.temperature, ...change }, seen.past);

function kept(seen, name, value) {
  const result = only(seen, { [name]: value });
  const { ids, kept: share } = result.find((stage) => stage.name === name);
  return { ids, share, result };
}

// -- the subjects -----------------------------------------------------------------------------------------------------

function heat(seen, question) {
  const { row, params } = seen;
  const best = row.order[0];
  const asked = numberAfter(question, HEAT, (value) => value > 0 && value <= 100);
  const heats = asked ? [...new Set([asked, 1])] : [0.1, 1, 2];
  const lines = heats.map((T) => {
    const probs = softmax(row.logits, T);
    return `at T = ${T} ${named(seen, best)} has ${percent(probs[best])} and the entropy is ${nats(entropyOf(probs))}`;
  });
  const now = params.temperature === 1 ? "It is 1 now: the distribution is as the model gives it."
    : params.temperature === 0 ? "It is 0 now, which is greedy." : `It is ${params.temperature} now, which gives ${named(seen, best)} ${percent(softmax(row.logits, params.temperature)[best])} before anything is cut.`;
  return ["The probability of a token is e^(logit ÷ T), divided by the sum of that over all tokens.", `With the logits on this page: ${lines.join("; ")}.`, "The order of the tokens never changes, only how much the better ones are favored.", now];
}

function zero(seen) {
  return [`At temperature 0 the formula would divide by zero, so the engine does not divide: it takes the token with the highest logit, here ${named(seen, seen.row.order[0])}, every time. That is greedy decoding: the same prompt gives the same text, which is what evaluations need.`];
}

function whyLikely(seen, question) {
  const { row } = seen;
  const [one, two] = tokensIn(question, seen);
  const best = one ?? row.order[0];
  const other = two ?? (best === row.order[0] ? row.order[1] : row.order[0]);
  const gap = row.logits[best] - row.logits[other];
  let mean = 0;
  for (const value of row.logits) mean += value / row.size;
  return [
    `${named(seen, best)} has ${best === row.order[0] ? `the highest logit of all ${whole(row.size)} tokens:` : "a logit of"} ${fixed(row.logits[best])}. ${named(seen, other)} has ${fixed(row.logits[other])}, and the average is ${fixed(mean)}.`,
    `Softmax makes a difference of ${fixed(gap)} a ratio of e^${fixed(gap)} = ${Math.exp(gap).toFixed(2)}: ${percent(row.probs[best])} against ${percent(row.probs[other])}.`,
    `The logits themselves are the model's: what its ${many(seen.source.model.layers, "layer")} made of ${quoted(tailOf(seen))}, compared with each token's own vector. The logit lens shows at which layer the final token takes the lead.`,
  ];
}

const whyNotBest = (seen) => [`${named(seen, seen.row.order[0])} has ${percent(seen.row.probs[seen.row.order[0]])}, so ${percent(1 - seen.row.probs[seen.row.order[0]])} of the probability is with the others. Always taking the best gives one text per prompt, which often repeats itself; a draw gives the others their share, and top-k or top-p keep it from the unlikely ones.`];

const tailOf = (seen) => {
  const text = seen.trace.texts.join("");
  return text.length > 40 ? `…${text.slice(-40)}` : text;
};

function likeliest(seen, question) {
  const { row, result } = seen;
  const count = numberAfter(question, "(?:top|best|likeliest)", (value) => Number.isInteger(value) && value >= 1 && value <= row.size) ?? 5;
  const top = Array.from(row.order.slice(0, count));
  const listed = top.slice(0, 12).map((id) => `${named(seen, id)} ${percent(row.probs[id])}`).join(", ");
  const lines = [`After ${quoted(tailOf(seen))} the likeliest tokens are ${listed}${count > 12 ? ", …" : ""}. The best ${whole(count)} together have ${percent(top.reduce((sum, id) => sum + row.probs[id], 0))}.`];
  if (changed(seen)) {
    const { ids, probs } = distribution(result);
    const best = ids[probs.reduce((at, p, i) => (p > probs[at] ? i : at), 0)];
    lines.push(`With your sampling parameters ${whole(ids.length)} of ${whole(row.size)} tokens stay, and ${named(seen, best)} has ${percent(probAt(result.at(-1), best))}.`);
  }
  return lines;
}

const changed = (seen) => seen.bias.size > 0 || Object.keys(OFF).some((name) => seen.params[name] !== OFF[name]);

const COMMON = new Set("a an and answer any are at be become best by chance do does first for has have high higher how i if in is it last layer less low lower made make model more much my likely logit mean most next no not odds of on or page probability rank sampled second so than that the this to token tokens top was what when which why will with word words".split(" "));

/** The tokens that a question names: in quotation marks, or as words that are among the likeliest. */
function tokensIn(question, seen) {
  const same = (text) => (id) => seen.text(id).trim().toLowerCase() === text;
  const marked = [...question.matchAll(/["“”'`‘’]\s*([^"“”'`‘’]+?)\s*["“”'`‘’]/g)].map(([, text]) => seen.row.order.find(same(text.toLowerCase())));
  const words = (question.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? []).filter((word) => !COMMON.has(word));
  const likely = seen.row.order.slice(0, LIKELY);
  const found = marked.some((id) => id !== undefined) ? marked : words.map((word) => likely.find(same(word)));
  return [...new Set(found)].filter((id) => id !== undefined);
}

function oneToken(seen, question) {
  const { row, result } = seen;
  const heat = numberAfter(question, HEAT, (value) => value > 0 && value <= 100);
  return tokensIn(question, seen).slice(0, 2).flatMap((id) => {
    const last = probAt(result.at(-1), id);
    const below = row.logits[row.order[0]] - row.logits[id];
    return [
      `${named(seen, id)} has a probability of ${percent(row.probs[id])}. It is number ${whole(row.order.indexOf(id) + 1)} of ${whole(row.size)} tokens, with a logit of ${fixed(row.logits[id])}, ${below > 0 ? `${fixed(below)} below the best one` : "the highest"}.`,
      ...(heat ? [`At T = ${heat} it has ${percent(softmax(row.logits, heat)[id])}.`] : []),
      ...(changed(seen) ? [last > 0 ? `With your sampling parameters it has ${percent(last)}.` : "Your sampling parameters cut it."] : []),
    ];
  });
}

const RANKS = ["", "", "second", "third", "fourth", "fifth"];
const RANKED = /how (likely|probable).*\b(second|third|fourth|fifth)\b(?!.*attention)/;

function ranked(seen, question) {
  const { row } = seen;
  const rank = RANKS.findIndex((word) => word && question.includes(word));
  const id = row.order[rank - 1];
  return [`The ${RANKS[rank]} likeliest token is ${named(seen, id)} with ${percent(row.probs[id])}, after ${Array.from(row.order.slice(0, rank - 1), (one) => `${named(seen, one)} with ${percent(row.probs[one])}`).join(", ")}.`];
}

function filter(name, label, usual, fits) {
  const word = label.replace("-", "-?");
  return (seen, question) => {
    const set = seen.params[name];
    const value = numberAfter(question, word, fits) ?? (set !== OFF[name] ? set : usual);
    if (seen.params.temperature === 0) return [`Temperature is 0 now, so ${named(seen, seen.row.order[0])} is taken and there is nothing left for ${label} to cut.`];
    const { ids, share } = kept(seen, name, value);
    const best = seen.row.order[0];
    return [
      `Here ${label} = ${value} keeps ${whole(ids.length)} of ${whole(seen.row.size)} tokens, which hold ${percent(share)} of the probability; the other ${whole(seen.row.size - ids.length)} are cut.`,
      `What is kept is normalized to 100%: ${named(seen, best)} goes from ${percent(probAt(only(seen, {})[1], best))} to ${percent(probAt(only(seen, { [name]: value }).at(-1), best))}.`,
      set === OFF[name] ? `It is off now.` : `It is set to ${set} now.`,
    ];
  };
}

const topK = filter("top_k", "top-k", 40, (value) => Number.isInteger(value) && value >= 1);
const topP = filter("top_p", "top-p", 0.9, (value) => value > 0 && value < 1);
const minP = filter("min_p", "min-p", 0.05, (value) => value > 0 && value <= 1);
const typical = filter("typical_p", "typical", 0.9, (value) => value > 0 && value < 1);
const epsilon = filter("epsilon_cutoff", "epsilon", 0.001, (value) => value > 0 && value < 1);
const eta = filter("eta_cutoff", "eta", 0.001, (value) => value > 0 && value < 1);

function tail(seen) {
  const { ids, share } = kept({ ...seen, params: { ...seen.params, temperature: 1 } }, "top_p", 0.9);
  const rest = seen.row.size - ids.length;
  return [`The likeliest ${whole(ids.length)} tokens hold ${percent(share)}; the tail, ${whole(rest)} tokens, shares the other ${percent(1 - share)}. Each of them is unlikely, but one draw in ${Math.max(1, Math.round(1 / Math.max(1 - share, 1e-9)))} takes one of them, and the text has to go on from it. Top-k and top-p cut that tail.`];
}

function entropy(seen) {
  const { row, result } = seen;
  const final = entropyOf(distribution(result).probs);
  const lines = [`Here it is ${nats(row.entropy)} (${(row.entropy / Math.LN2).toFixed(2)} bits): as uncertain as an even choice among ${Math.exp(row.entropy).toFixed(1)} tokens. It would be 0 with one certain token, and ${nats(Math.log(row.size))} if all ${whole(row.size)} were equally likely.`];
  if (changed(seen)) lines.push(`After your sampling parameters it is ${nats(final)}.`);
  return lines;
}

function logit(seen) {
  const { row } = seen;
  const least = row.order.at(-1);
  return [`This pass gave ${whole(row.size)} of them, one for each token: the highest is ${fixed(row.logits[row.order[0]])} for ${named(seen, row.order[0])}, the lowest ${fixed(row.logits[least])} for ${named(seen, least)}. Softmax turns them into probabilities.`];
}

function softmaxOf(seen) {
  const { row } = seen;
  const [best, second] = row.order;
  return [`For ${named(seen, best)}: e to the power of its logit ${fixed(row.logits[best])}, divided by the sum over all ${whole(row.size)} tokens, is ${percent(row.probs[best])}. For ${named(seen, second)}, with ${fixed(row.logits[second])}, it is ${percent(row.probs[second])}. All of them add up to 100%.`];
}

const greedy = (seen) => [`Here greedy takes ${named(seen, seen.row.order[0])}, which has the highest logit, ${fixed(seen.row.logits[seen.row.order[0]])}, and a probability of ${percent(seen.row.probs[seen.row.order[0]])}. Nothing about it is random.`];

const forwardPass = (seen) => [`The ${many(seen.trace.tokens.length, "token")} of ${quoted(tailOf(seen))} run through ${many(seen.source.model.layers, "layer")}; what comes out is ${whole(seen.row.size)} logits, one for every token of the vocabulary, not a word. Softmax and a decoder turn them into one token.`];

const vocabulary = (seen) => [`${seen.source.model.name} has ${whole(seen.row.size)} tokens, so every pass outputs ${whole(seen.row.size)} logits.`];

const promptTokens = (seen) => [`The prompt is ${many(seen.trace.prompt_tokens, "token")}: ${seen.trace.texts.slice(0, seen.trace.prompt_tokens).slice(-12).map(quoted).join(" ")}.`];

function choosing(seen) {
  const { params, result, row } = seen;
  const [taken] = draw(result, seen.seed, seen.trace.position);
  const on = Object.keys(OFF).filter((name) => params[name] !== OFF[name]).map((name) => `${name} ${params[name]}`);
  return [
    `The pass gives ${whole(row.size)} logits. Then, in this order: bias and penalties, temperature, top-k, top-p, min-p, typical, epsilon, eta, and a draw. ${on.length ? `Set now: ${on.join(", ")}.` : "All of these are off now, so the draw is from the model's own distribution."}`,
    `${many(result.at(-1).ids.length, "token")} can be drawn; with seed ${seen.seed} at position ${seen.trace.position} it is ${named(seen, taken)}, which has ${percent(probAt(result.at(-1), taken))}. Greedy would take ${named(seen, row.order[0])}.`,
  ];
}

const seedOf = (seen) => [`The seed is ${seen.seed} and the position ${seen.trace.position}, so the draw is ${named(seen, draw(seen.result, seen.seed, seen.trace.position)[0])} every time. Another seed may draw another token. At temperature 0 nothing is drawn, and the seed does not matter.`];

function penalties(seen) {
  const { params } = seen;
  return ["Repetition divides positive logits of all earlier tokens, and multiplies negative ones. Presence subtracts once from every token that was generated, frequency once for each time.",
    `Now: repetition ${params.repetition_penalty}, presence ${params.presence_penalty}, frequency ${params.frequency_penalty}; ${whole(seen.past.seen.size)} different tokens occurred so far.`];
}

const biasOf = (seen) => [`A bias is added to the logit of one token before everything else: + makes it likelier, − less likely. ${seen.bias.size ? `Set now: ${[...seen.bias].map(([id, value]) => `${named(seen, id)} ${value > 0 ? "+" : ""}${value}`).join(", ")}.` : "None is set now."}`];

const attention = (seen) => [`This model has ${many(seen.source.model.heads, "head")} in each of ${many(seen.source.model.layers, "layer")}; the last of ${many(seen.trace.tokens.length, "token")} spreads 100% over ${many(seen.trace.tokens.length, "slot")} in each head. “Attention & mask” in your Lab shows it.`];

const sink = (seen) => [`Softmax makes each head spread 100% of its weight over the slots, even when it needs none of them. Heads learn to leave what they do not need at the first slot, here ${quoted(seen.trace.texts[0])}, whatever its token is: it is called the attention sink. “Attention & mask” in your Lab names its share and sets it apart.`];

const pages = (seen) => [`This sequence of ${many(seen.trace.tokens.length, "token")} takes ${many(seen.trace.pages?.length ?? Math.ceil(seen.trace.tokens.length / seen.trace.page_size), "page")} of ${seen.trace.page_size} slots. Together the pages are the KV cache: the next pass reads them instead of computing those tokens again.`];

const hiddenState = (seen) => [`Each of the ${many(seen.trace.tokens.length, "token")} here has one after each of ${many(seen.source.model.layers, "layer")}. The last one of the last token is compared with every token's own vector, which gives the ${whole(seen.row.size)} logits.`];

const lens = (seen) => [`This model has ${many(seen.source.model.layers, "layer")}; its final best token is ${named(seen, seen.row.order[0])}. The tab “Logit lens” of your Lab shows from which layer on it leads.`];

function advice(seen) {
  const result = stages(seen.row, { ...OFF, temperature: 0.7, top_p: 0.9 }, seen.past);
  return [`For evaluations, temperature 0: greedy, the same prompt gives the same text; here that is ${named(seen, seen.row.order[0])}.`,
    `For conversation, around 0.7 with top-p 0.9: here that leaves ${many(result.at(-1).ids.length, "token")}, and ${named(seen, seen.row.order[0])} has ${percent(probAt(result.at(-1), seen.row.order[0]))}.`];
}

function model(seen) {
  const { model: facts } = seen.source;
  return [`This is ${facts.name}: ${whole(facts.parameters)} parameters, ${many(facts.layers, "layer")}, ${many(facts.heads, "head")}, ${whole(facts.vocab_size)} tokens. Its weights are kept as ${facts.format}.`];
}

// Subjects in order of precedence: [words, glossary terms, sentences, subjects it replaces].
const SUBJECTS = {
  sums: [/\b(sum|add)s?\b.*\bto (1|one|100)\b/, ["Softmax"], softmaxOf, ["oneToken", "whyLikely", "softmax", "distribution"]],
  ranked: [RANKED, [], ranked, ["oneToken", "whyLikely", "likeliest", "token", "distribution"]],
  hidden: [/hidden (state|vector)|embedding/, ["Hidden state"], hiddenState, ["logit", "token"]],
  sink: [/\bsinks?\b|first (token|slot|word).*attention|attention.*first (token|slot|word)/, ["Attention"], sink, ["attention", "whyLikely", "likeliest"]],
  lens: [/\blens\b|(which|what) layer/, ["Logit lens"], lens, ["logit", "model"]],
  zero: [/(temperature|\bt\b)\s*(=|of|is|to|at)?\s*(0|zero)(?![.\d])|divi\w* by (0|zero)/, ["Temperature"], zero, ["heat", "greedy"]],
  advice: [/\beval|reproduc|determinis|same (text|answer|output)|which (settings|temperature)|\bchat\b|conversation|creativ|recommend|should i (use|set)/, [], advice, ["heat", "greedy", "choosing"]],
  promptTokens: [/\bprompt\b/, ["Token"], promptTokens, ["vocabulary", "token", "likeliest"]],
  oneToken: [/how (likely|probable)|probability|chance|\brank\b|\bodds\b|\blogit of\b/, [], oneToken, ["likeliest", "logit", "distribution", "token", "whyLikely"], (question, seen) => !/\bwhy\b/i.test(question) && tokensIn(question, seen).length > 0],
  whyNotBest: [/why (not|don.t|shouldn.t|wouldn.t|isn.t).*(best|greed|likeliest|top|first)|not (just|always)|always (take|pick|use)/, ["Greedy"], whyNotBest, ["whyLikely", "greedy", "choosing", "likeliest"]],
  whyLikely: [/\bwhy\b/, [], whyLikely, ["likeliest", "token", "choosing", "distribution"], (question, seen) => /likel|probab|\b(first|best|top)\b(?![- ][kp]\b)|favou?rite|chosen|win/i.test(question) || tokensIn(question, seen).length > 0],
  choosing: [/how.*(chosen|choose|pick|select|decode|sampled?\b|draw)|(?<!greedy )decod|(?<!nucleus |top-p |top-k )\bsampling\b|become.*token|logits?.*(to|into).*token/, ["Decoding"], choosing, ["likeliest", "logit", "token"]],
  heat: [/temperature|(?<!['’])\bt\b/, ["Temperature"], heat],
  topK: [/top[- ]?k\b/, ["Top-k"], topK, ["likeliest", "vocabulary"]],
  topP: [/top[- ]?p\b|nucleus/, ["Top-p"], topP, ["likeliest", "vocabulary"]],
  minP: [/min[- ]?p\b/, ["Min-p"], minP, ["vocabulary"]],
  typical: [/\btypical/, ["Typical"], typical, ["vocabulary"]],
  epsilon: [/\bepsilon/, ["Epsilon"], epsilon, ["vocabulary"]],
  eta: [/\beta\b/, ["Eta"], eta, ["vocabulary"]],
  tail: [/\btail\b|derail|nonsense|long shots?|unlikely|improbable|\brare/, [], tail],
  entropy: [/entropy|uncertain|\bsure\b|perplex|confiden/, ["Entropy"], entropy],
  softmax: [/softmax|logits?.*(become|into|to).*probab/, ["Softmax"], softmaxOf, ["distribution"]],
  forwardPass: [/forward pass|come(s)? out/, ["Forward pass"], forwardPass, ["token"]],
  logit: [/\blogits?\b|raw scores?/, ["Logit"], logit],
  greedy: [/greedy|argmax/, ["Greedy", "Argmax"], greedy],
  likeliest: [/likeliest|most likely|(next|best|top|first) (tokens?|words?|\d+)|top \d+|(come|comes|predicts?) next|predict/, [], likeliest, ["token", "distribution"]],
  vocabulary: [/vocab|how many tokens/, ["Vocabulary"], vocabulary, ["token"]],
  seed: [/\bseed|random/, ["Seed"], seedOf],
  penalties: [/penalt|repetition|presence|frequency|repeat/, ["Penalty"], penalties],
  bias: [/\bbias/, [], biasOf],
  attention: [/attention|attend|\bheads?\b/, ["Attention"], attention],
  pages: [/\bpages?\b|kv[- ]?cache|\bcache\b/, ["Page"], pages],
  model: [/(which|what) model|parameters does|how many (layers|heads|parameters)|weights?\b|quanti[sz]/, [], model],
  mask: [/\bmask/, ["Mask"], () => []],
  context: [/\bcontext\b/, ["Context"], () => []],
  distribution: [/distribution|probabilit/, ["Distribution"], likeliest],
  token: [/what.*\btokens?\b/, ["Token"], promptTokens],
};

/** The answer to a question: [{term, text}] of paragraphs, or nothing if the page has none. */
export function answer(question, seen) {
  const words = question.toLowerCase().replaceAll("_", "-");
  const replaced = new Set();
  const found = [];
  for (const [id, [pattern, terms, say, instead = [], fits = () => true]] of Object.entries(SUBJECTS)) {
    if (replaced.has(id) || !pattern.test(words) || !fits(question, seen)) continue;
    for (const one of instead) replaced.add(one);
    found.push([terms, say]);
  }
  const result = [];
  for (const [terms, say] of found.slice(0, MOST)) {
    for (const term of terms) result.push({ term, text: MEANING.get(term) });
    for (const text of say(seen, words)) result.push({ text });
  }
  return result;
}
