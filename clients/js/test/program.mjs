// One program that uses most of the client; it gives plain values, to be compared with what Python gives.

/** The program, with the client `hw` and an engine. */
export async function program(hw, engine) {
  const found = {};
  const ctx = engine.context({ seed: 5 });
  await ctx.fill(range(30));
  const fwd = ctx.forward().input([7, 8]).inputAt([9], [40]);
  fwd.mask({ forbid: [3] }).mask({ allow: range(0, engine.vocabSize, 2), rows: [-1] });
  fwd.attentionMask(hw.Mask.window(20).or(hw.Mask.sink(2, 1)));
  const drawn = fwd.sample([0, -1], hw.Sampling({ temperature: 0.9, topK: 20, repetitionPenalty: 1.2 }));
  const logits = fwd.probe(-1, hw.Logits());
  const top = fwd.probe(-1, hw.Distribution({ k: 3 }));
  const entropy = fwd.probe(0, hw.Entropy());
  const scores = fwd.probe(1, hw.AttentionScores(0));
  const lens = fwd.probe(1, hw.LogitLens([0, 1], 2));
  const ranking = fwd.probe(-1, hw.Ranking({ k: 2, ids: [5] }));
  const out = await fwd.execute();
  found.drawn = out.tokens(drawn);
  found.logits = Array.from(out.read(logits));
  found.top = [out.read(top).ids, Array.from(out.read(top).probs)];
  found.entropy = out.read(entropy);
  found.scores = [out.read(scores).shape, Array.from(out.read(scores).data)];
  found.lens = out.read(lens).map(({ ids }) => ids);
  found.ranks = out.read(ranking).best.map(({ id, rank }) => [id, rank]);
  found.seeds = out.stats.seeds.map(String);
  found.state = [(await ctx.state()).seqLen, (await ctx.state()).nextPosition, (await ctx.inner().state()).committed];

  const fork = await ctx.fork();
  const first = fork.forward();
  const token = first.sample([-1], hw.Argmax());
  first.execute();
  const second = fork.forward().input(token);
  const next = second.sample([-1], hw.Argmax());
  found.fed = (await second.execute()).token(next);

  const ruled = (await ctx.fork()).forward().input([5, 6]).attentionMask(hw.Mask.rule((row, slots) => slots.map((slot) => slot < 3 || (row - slot) % 4 === 0)));
  const seen = ruled.probe(-1, hw.Logits());
  found.ruled = Array.from((await ruled.execute()).read(seen));

  const generation = ctx.generate(hw.TopP(0.9, { seed: 3 }), { maxTokens: 40, probe: [hw.Entropy(), hw.Logprob(4)] });
  found.steps = [];
  for await (const step of generation) {
    found.steps.push([step.tokens, step.probes.map(([nats, logprob]) => [nats, logprob[0]])]);
    if (found.steps.length === 7) break;
  }
  found.after = [await ctx.tokens(), await generation.generated()];
  await ctx.truncate(2);
  found.rest = await generation.tokens();
  found.finish = generation.finish;
  const sequences = await (await ctx.fork()).generate(null, { numBeams: 3, numReturnSequences: 2, maxTokens: 5 }).sequences();
  found.beams = sequences.map(({ tokens }) => tokens);
  found.even = await (await ctx.fork()).generate(hw.Multinomial({ seed: 4 }), { maxTokens: 9, constrain: new Even(engine.vocabSize) }).tokens();
  const liked = (row) => void (row[17] += 3);
  found.liked = await (await ctx.fork()).generate(hw.TopP(0.9, { seed: 1 }), { maxTokens: 6, logits: liked }).tokens();
  const rules = { dryMultiplier: 2, dryAllowedLength: 1, dryPenaltyLastN: 40, drySequenceBreakers: [], mirostat: 2, mirostatTau: 3 };
  found.ruledBy = await (await ctx.fork()).generate(hw.Sampling({ seed: 6, ...rules }), { maxTokens: 12 }).tokens();
  const excluded = { doSample: true, xtcProbability: 0.5, xtcThreshold: 0.01, minP: 0.001 };
  found.excluded = await (await ctx.fork()).generate(null, { maxTokens: 12, ...excluded }).tokens();
  await ctx.save("from-js");
  const opened = await engine.open("from-js");
  found.opened = (await opened.tokens()).length;
  found.deleted = [await engine.delete("from-js"), await engine.open("from-js")];
  try {
    await ctx.truncate(1e6);
  } catch (error) {
    found.refused = [error.kind, error.message];
  }
  for (const each of [ctx, fork, opened]) each.release();
  return found;
}

/** A constraint of the program's own: even ids. */
class Even {
  constructor(vocab) {
    this.vocab = vocab;
  }

  mask() {
    const words = new Uint32Array(Math.ceil(this.vocab / 32)).fill(0x55555555);
    return words;
  }

  accept(token) {
    if (token % 2) throw new RangeError(`${token} is odd`);
  }

  rollback() {}
}

function range(from, to, step = 1) {
  const [first, end] = to === undefined ? [0, from] : [from, to];
  return Array.from({ length: Math.ceil((end - first) / step) }, (_, i) => first + i * step);
}
