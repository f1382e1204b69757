// Pages by hand: reserve, commit, release, roll back, discard, move. Misuse is refused and changes nothing.
export class Pages {
    context;
    /** @internal */
    constructor(context) {
        this.context = context;
    }
    async state() {
        const { committed, working, working_tokens, pages } = await this.context.ask("state", {}, "pages");
        const listed = pages.map(([page, state, holders]) => ({ page, state, holders }));
        return { committed, working, workingTokens: working_tokens, pages: listed };
    }
    /** Add n empty working pages. */
    reserveWorkingPages(n) {
        return this.context.ask("reserve", { n }, "pages");
    }
    /** Make the first k working pages immutable and shared by forks; each must be full. */
    commitWorkingPages(k) {
        return this.context.ask("commit", { k }, "pages");
    }
    /** Free the last n working pages, and drop the tokens in them. */
    releaseWorkingPages(n) {
        return this.context.ask("release", { n }, "pages");
    }
    /** Drop the last n computed tokens, which must lie in working pages. */
    truncateWorkingPageTokens(n) {
        return this.context.ask("truncate", { n }, "pages");
    }
    /** Free n full pages from page number `start` on. */
    discardPages(start, n) {
        return this.context.ask("discard", { start, n }, "pages");
    }
    /** Keep these slots of the sequence's tail, compacted, each with its position. */
    keepSlots(slots, start = null) {
        return this.context.ask("keep", { slots: [...slots], start }, "pages");
    }
    /** Put committed pages of another context after this one's last slot. */
    appendFrom(other, pages, shift = 0) {
        other.settle();
        return this.context.ask("append", { other: other.number, pages: [...pages], shift }, "pages");
    }
}
