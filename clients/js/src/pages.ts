// Pages by hand: reserve, commit, release, roll back, discard, move. Misuse is refused and changes nothing.

import type { Context } from "./context.js";

export interface PagesState {
  committed: number;
  working: number;
  workingTokens: number;
  /** Where each page is, its state, and how many contexts hold it, in the order of the slots. */
  pages: { page: number; state: string; holders: number }[];
}

export class Pages {
  /** @internal */
  constructor(private readonly context: Context) {}

  async state(): Promise<PagesState> {
    const { committed, working, working_tokens, pages } = await this.context.ask("state", {}, "pages");
    const listed = pages.map(([page, state, holders]: [number, string, number]) => ({ page, state, holders }));
    return { committed, working, workingTokens: working_tokens, pages: listed };
  }

  /** Add n empty working pages. */
  reserveWorkingPages(n: number): Promise<void> {
    return this.context.ask("reserve", { n }, "pages");
  }

  /** Make the first k working pages immutable and shared by forks; each must be full. */
  commitWorkingPages(k: number): Promise<void> {
    return this.context.ask("commit", { k }, "pages");
  }

  /** Free the last n working pages, and drop the tokens in them. */
  releaseWorkingPages(n: number): Promise<void> {
    return this.context.ask("release", { n }, "pages");
  }

  /** Drop the last n computed tokens, which must lie in working pages. */
  truncateWorkingPageTokens(n: number): Promise<void> {
    return this.context.ask("truncate", { n }, "pages");
  }

  /** Free n full pages from page number `start` on. */
  discardPages(start: number, n: number): Promise<void> {
    return this.context.ask("discard", { start, n }, "pages");
  }

  /** Keep these slots of the sequence's tail, compacted, each with its position. */
  keepSlots(slots: Iterable<number>, start: number | null = null): Promise<void> {
    return this.context.ask("keep", { slots: [...slots], start }, "pages");
  }

  /** Put committed pages of another context after this one's last slot. */
  appendFrom(other: Context, pages: Iterable<number>, shift = 0): Promise<void> {
    other.settle();
    return this.context.ask("append", { other: other.number, pages: [...pages], shift }, "pages");
  }
}
