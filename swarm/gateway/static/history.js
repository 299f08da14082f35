/* Chats in this browser's IndexedDB. Where it is closed to us, they last as long as the tab. */

const NAME = "swarm-chat";
const STORE = "chats";

export class History {
  #database; // null: no storage
  #tabs = new BroadcastChannel(NAME);
  constructor(database) {
    this.#database = database;
  }

  static async open() {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
      return new History(await settled(request));
    } catch {
      return new History(null);
    }
  }

  get lasts() {
    return this.#database !== null;
  }

  /** All chats, the latest first. */
  async all() {
    const chats = (await this.#in("readonly", (store) => store.getAll())) ?? [];
    return chats.sort((a, b) => b.at - a.at);
  }

  put(chat) {
    return this.#change((store) => store.put(chat));
  }

  delete(id) {
    return this.#change((store) => store.delete(id));
  }

  clear() {
    return this.#change((store) => store.clear());
  }

  /** Call a function whenever another tab has changed something. */
  onChange(told) {
    this.#tabs.onmessage = told;
  }

  async #change(work) {
    await this.#in("readwrite", work);
    if (this.lasts) this.#tabs.postMessage(null);
  }

  async #in(mode, work) {
    if (this.#database === null) return undefined;
    return settled(work(this.#database.transaction(STORE, mode).objectStore(STORE)));
  }
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** A small value that the page remembers: the last model, the last sampling. */
export const remembered = {
  get(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`swarm-${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`swarm-${name}`, JSON.stringify(value));
    } catch {
      // storage is off or full: the page works without
    }
  },
};
