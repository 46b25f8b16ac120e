// Feed asks the agent for its pages, with the token that the user has given. The token
// is kept for this tab alone.

const storage = "inferrail.token";

// Refused is an answer other than what was asked for. status 0 is none at all.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Feed {
  constructor() {
    this.token = recall();
  }

  use(token) {
    this.token = token;
    try {
      if (token) sessionStorage.setItem(storage, token);
      else sessionStorage.removeItem(storage);
    } catch {
      // It lasts until the page is closed, then.
    }
  }

  json(path) {
    return this.ask(path, {}, (r) => r.json());
  }

  text(path, accept) {
    return this.ask(path, {}, (r) => r.text(), accept);
  }

  post(path, body) {
    return this.ask(path, { method: "POST", body, headers: { "Content-Type": "application/json" } }, (r) => r.json());
  }

  // ask fetches a page by its path, which is relative to this one, so that the agent may
  // be behind a proxy that gives it a path of its own. accept says which statuses will do
  // beside those of success.
  async ask(path, options, read, accept = []) {
    const headers = { ...options.headers };
    const token = this.token;
    if (token) headers.Authorization = `Bearer ${token}`;
    let answer;
    try {
      answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error", signal: AbortSignal.timeout(10000) });
      if (answer.ok || accept.includes(answer.status)) return await read(answer);
    } catch (e) {
      throw new Refused(0, e.name === "TimeoutError" ? "the agent does not answer" : answer ? `its answer to ${path} cannot be read` : "the agent cannot be reached");
    }
    // It says nothing of a token that was given meanwhile.
    if (answer.status === 401 && token !== this.token) return this.ask(path, options, read, accept);
    const why = (await answer.text().catch(() => "")).trim().slice(0, 400);
    throw new Refused(answer.status, why || `status ${answer.status}`);
  }
}

function recall() {
  try {
    return sessionStorage.getItem(storage) ?? "";
  } catch {
    return "";
  }
}
