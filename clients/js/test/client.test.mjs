// The client against a real server: the addresses, what Python gives, and the client's folder come by the environment.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import net from "node:net";
import test from "node:test";
import { pathToFileURL } from "node:url";

import { program } from "./program.mjs";

const { HEADWAY_URLS, HEADWAY_CLIENT, HEADWAY_EXPECTED, HEADWAY_MODEL } = process.env;
const hw = await import(pathToFileURL(`${HEADWAY_CLIENT}/index.js`));
const expected = JSON.parse(readFileSync(HEADWAY_EXPECTED, "utf8"));
const patient = { timeout: 120_000 };

for (const url of HEADWAY_URLS.split(" ")) {
  test(`a program gives what it gives in Python, at ${url.split(":")[0]}`, patient, async (t) => {
    const engine = await hw.connect(url);
    t.after(() => engine.close());
    const found = await program(hw, engine);
    for (const [name, value] of Object.entries(expected)) close(found[name], value, name);
  });

  test(`many passes are in flight, at ${url.split(":")[0]}`, patient, async (t) => {
    const engine = await hw.connect(url);
    t.after(() => engine.close());
    const texts = Array.from({ length: 12 }, async (_, i) => {
      const ctx = engine.context();
      void ctx.fill([i, 2]);
      return ctx.generate(hw.Argmax(), { maxTokens: 20 }).tokens();
    });
    assert.equal((await Promise.all(texts)).every((tokens) => tokens.length === 20), true);
  });

  test(`what the server refuses rejects, and the session goes on, at ${url.split(":")[0]}`, patient, async (t) => {
    const engine = await hw.connect(url);
    t.after(() => engine.close());
    const ctx = engine.context();
    await assert.rejects(ctx.fill([engine.vocabSize]), (error) => error instanceof hw.HeadwayError && error.kind === "InvalidToken");
    await assert.rejects(ctx.forward().input([1]).attentionMask([[9]]).execute(), { kind: "InvalidMask" });
    await assert.rejects(ctx.forward().input([1]).adapter("x").execute(), /there is no adapter 'x' on this server; it has none/);
    await assert.rejects(ctx.fill([1]).then(() => ctx.generate(hw.Argmax(), { maxTokens: -1 }).tokens()), { kind: "InvalidInput" });
    const thrown = new Error("mine");
    const hook = () => {
      throw thrown;
    };
    await assert.rejects(ctx.generate(hw.Argmax(), { maxTokens: 3, logits: hook }).tokens(), (error) => error === thrown);
    assert.throws(() => ctx.forward().input([1]).mask({ allow: [-1] }), { kind: "InvalidToken" });
    assert.equal((await ctx.generate(hw.Argmax(), { maxTokens: 3 }).tokens()).length, 3);
    ctx.release();
    assert.throws(() => ctx.forward(), { kind: "Closed" });
    engine.close();
    assert.throws(() => engine.context(), { kind: "Closed" });
  });
}

test("a program names one of the server's models, and one that it lacks is refused", patient, async (t) => {
  const [url] = HEADWAY_URLS.split(" ");
  const engine = await hw.connect(url, { model: HEADWAY_MODEL });
  t.after(() => engine.close());
  assert.equal(engine.alive, true);
  await assert.rejects(hw.connect(url, { model: "nobody" }), (error) => error instanceof hw.HeadwayError && /'nobody'/.test(error.message));
});

test("an address that is not one, or where nobody listens, is refused", patient, async () => {
  await assert.rejects(hw.connect("ftp://example.org"), { name: "ConnectionFailed" });
  await assert.rejects(hw.connect("http://127.0.0.1:9"), /cannot connect/);
});

for (const url of HEADWAY_URLS.split(" ")) {
  for (const count of [3, 7]) {
    test(`a connection that is cut after every ${count} pieces is resumed, at ${url.split(":")[0]}`, patient, async (t) => {
      const proxy = await cutting(url, count);
      t.after(() => proxy.close());
      const engine = await hw.connect(proxy.url);
      t.after(() => engine.close());
      const found = await program(hw, engine);
      for (const [name, value] of Object.entries(expected)) close(found[name], value, name);
      assert.ok(proxy.cuts() > 3, `${proxy.cuts()} cuts`);
    });
  }
}

/** A proxy before a server that cuts each connection when the server has sent so many pieces after its first two. */
async function cutting(url, count) {
  const unix = url.startsWith("unix:");
  const far = unix ? { path: url.slice(5) } : { host: "127.0.0.1", port: Number(new URL(url).port) };
  let cuts = 0;
  const server = net.createServer((near) => {
    const there = net.connect(far);
    let left = count + 2; // the handshake and the welcome
    near.on("data", (data) => there.write(data));
    there.on("data", (data) => {
      if (left-- > 0) near.write(data);
      else if (!near.destroyed) {
        cuts++;
        near.destroy();
        there.destroy();
      }
    });
    for (const [one, other] of [[near, there], [there, near]]) {
      one.on("close", () => other.destroy());
      one.on("error", () => other.destroy());
    }
  });
  const address = unix ? `${url.slice(5)}-cut${count}` : 0;
  await new Promise((resolve) => server.listen(address, ...(unix ? [] : ["127.0.0.1"]), resolve));
  const own = unix ? `unix:${address}` : `http://127.0.0.1:${server.address().port}`;
  return { url: own, cuts: () => cuts, close: () => server.close() };
}

/** Numbers to float tolerance, everything else exactly. */
function close(found, wanted, name) {
  if (typeof wanted === "number" && typeof found === "number") {
    assert.ok(Math.abs(found - wanted) <= 1e-4 * Math.max(1, Math.abs(wanted)), `${name}: ${found} is not ${wanted}`);
  } else if (Array.isArray(wanted)) {
    assert.equal(found?.length, wanted.length, name);
    wanted.forEach((value, i) => close(found[i], value, `${name}[${i}]`));
  } else assert.deepEqual(found, wanted, name);
}
