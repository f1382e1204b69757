// The same call, for a shell and for Python.

import { copyButton, fill, h } from "./dom.js";
import { OFF } from "./sampling.js";

export function callPanel(lab, body) {
  const show = () => fill(body, snippets(lab).map(([title, about, code]) => h("section", { class: "panel" },
    h("div", { class: "spread" }, h("h2", {}, title), copyButton(code)), h("p", { class: "soft" }, about), h("pre", { tabindex: "0", role: "region", "aria-label": title }, h("code", {}, code)))));
  show();
  return { numbers: show };
}

function snippets(lab) {
  const { params, seed, bias } = lab.state;
  const { trace } = lab.now;
  const changed = Object.fromEntries(Object.entries(params).filter(([name, value]) => value !== OFF[name]));
  const prompt = typeof lab.state.prompt === "string" && !lab.state.chat && lab.state.at < 0 ? lab.state.prompt : trace.tokens;
  const base = new URL("..", location.href.split("#")[0]).href.replace(/\/$/, "");
  const request = { prompt, max_tokens: 1, logprobs: 8, temperature: params.temperature, seed, ...changed };
  if (bias.size) request.logit_bias = Object.fromEntries(bias);
  const traceRequest = { prompt, sampling: { ...changed, seed }, lens: { k: 5 } };
  const shell = (path, value) => `curl ${base}${path} \\\n  -H 'content-type: application/json' \\\n  -d '${JSON.stringify(value).replaceAll("'", "'\\''")}'`;
  const python = [...Object.entries(changed), ...(bias.size ? [["logit_bias", `{${[...bias].map(([id, value]) => `${id}: ${value}`).join(", ")}}`]] : []), ["seed", seed]].map(([name, value]) => `${name}=${value}`).join(", ");
  const filled = typeof prompt === "string" ? pythonText(prompt) : `[${prompt.join(", ")}]`;
  return [
    ["Complete, with curl", "The ordinary route: one token, sampled with these parameters, and the eight likeliest.", shell("/v1/completions", request)],
    ["Trace, with curl", "What this page requests: all logits, the sampler's result, the logit lens.", shell("/lab/api/trace", traceRequest)],
    ["In Python, in process", "The forward pass is the API: no server at all.", `import headway as hw

async def main(engine):
    async with engine.context() as ctx:
        ctx.fill(${filled})
        fwd = ctx.forward()
        token = fwd.sample([-1], hw.Sampling(${python}))
        row = fwd.probe(-1, hw.Logits())
        out = await fwd.execute()
        return out.token(token), out.logits(row)

with hw.Engine(${pythonText(lab.source.model.name)}) as engine:
    token, logits = engine.run(main)
    print(engine.tokenizer.token_text(token), logits.shape)
`],
  ];
}

const pythonText = (text) => JSON.stringify(text).replaceAll("\\u2028", "\\u2028");
