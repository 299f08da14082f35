/* Markdown that grows. Blocks that are over stay as they are; only the last one is made again, and its differences
   are put in place, so that nothing flickers and a selection stays. A model's text is a stranger's: HTML in it is shown as text,
   images are links, and the rest passes DOMPurify. */

import { Marked } from "./vendor/marked.js";
import "./vendor/purify.js";

const { DOMPurify } = globalThis;
const PLAIN_TAG = /^<\/?(?:br|sub|sup|kbd)\s*\/?>$/i;
const CLEAN = {
  ALLOWED_TAGS: "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr kbd li ol p pre strong sub sup table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const marked = new Marked({ gfm: true, breaks: false });
marked.use({
  renderer: {
    html: ({ text }) => text.split(/(<[^<>]*>)/).map((part) => (PLAIN_TAG.test(part) ? part : escaped(part))).join(""),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code({ text, lang }) {
      const name = /^[\w+#.-]{1,20}/.exec(lang ?? "")?.[0] ?? "";
      return `<pre class="${escaped(name)}"><code>${escaped(text)}</code></pre>\n`;
    },
  },
});

/** Shows a text in an element. */
export class Markdown {
  #root;
  #text = "";
  #settled = 0; // characters of blocks that are over
  #kept = 0; // their elements
  #over = false;

  constructor(root) {
    this.#root = root;
  }

  /** Show a text that may have grown. over: it will not grow any more. */
  update(text, over) {
    if (text === this.#text && over === this.#over) return;
    this.#over = over;
    try {
      this.#draw(text, over);
    } catch {
      const plain = document.createElement("div"); // of a text that the parser does not bear, such as one nested too deep
      plain.textContent = text;
      this.#root.replaceChildren(plain);
      this.#settled = this.#kept = 0;
      this.#text = text;
    }
  }

  #draw(text, over) {
    if (!text.startsWith(this.#text.slice(0, this.#settled)) || (over && /^ {0,3}\[[^\]]+\]:/m.test(text))) {
      this.#settled = this.#kept = 0; // another text, or a definition at its end that links above it need
    }
    this.#text = text;
    const tokens = marked.lexer(text.slice(this.#settled));
    const last = tokens.findLastIndex((token) => token.type !== "space");
    let at = this.#kept;
    tokens.forEach((token, i) => {
      if (token.type !== "space" && token.type !== "def") this.#show(at++, i === last && !over ? mended(token, tokens.links) : [token], tokens.links);
      if (i < last) {
        this.#settled += token.raw.length;
        this.#kept = at;
      }
    });
    while (this.#root.childElementCount > at) this.#root.lastElementChild.remove();
  }

  #show(index, tokens, links) {
    const block = document.createElement("div");
    block.append(decorated(DOMPurify.sanitize(marked.parser(Object.assign(tokens, { links })), CLEAN)));
    const old = this.#root.children[index];
    if (old) morph(old, block);
    else this.#root.append(block);
  }
}

/** The tokens of a block that is still being written, as if its open marks were closed. */
function mended(token) {
  const { raw } = token;
  if (token.type === "code" || (raw.match(/^\s*(?:```|~~~)/gm) ?? []).length % 2) return [token];
  if (/^\|[^\n]*(?:\n[\s|:-]*)?$/.test(raw)) return []; // a table begins: its second line says so
  const text = raw.replace(/\n\s*(?:[-=*+#]+|\d+[.)]?) ?$/, ""); // a list begins, and no underlined heading
  const [open] = text.split(/\n\s*\n|\n(?=\s*(?:[-*+]|\d+[.)])\s)/).slice(-1);
  return marked.lexer(text.slice(0, text.length - open.length) + closed(open));
}

function closed(open) {
  const text = open.replace(/!?\[([^\]]*)\]?(?:\]\([^)]*)?$/, "$1");
  const code = text.match(/`+/g) ?? [];
  if (code.length % 2) return text.replace(/`+$/, "") + (text.endsWith("`") ? "" : code.at(-1));
  const words = text.replace(/`[^`]*`/g, "").replace(/^\s*[-*+]\s/, "");
  let end = text;
  for (const [mark, found] of [["~~", /~~/g], ["**", /\*\*/g], ["*", /(?<!\*)\*(?!\*)/g]]) {
    if ((words.match(found) ?? []).length % 2 === 0) continue;
    end = end.endsWith(mark) ? end.slice(0, -mark.length) : end.trimEnd() + mark;
  }
  return end;
}

/** Code gets its name and a copy button; wide parts scroll by keyboard, too; links leave without a referrer. */
function decorated(fragment) {
  for (const link of fragment.querySelectorAll("a")) {
    Object.assign(link, { target: "_blank", rel: "noopener noreferrer nofollow", title: link.href });
  }
  for (const pre of fragment.querySelectorAll("pre")) {
    const bar = document.getElementById("t-code").content.cloneNode(true).firstElementChild;
    const name = pre.className;
    bar.querySelector("span").textContent = name;
    pre.removeAttribute("class");
    scrollable(pre, name ? `Code: ${name}` : "Code");
    pre.replaceWith(bar);
    bar.append(pre);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = document.createElement("div");
    box.className = "scroll";
    scrollable(box, "Table");
    table.replaceWith(box);
    box.append(table);
  }
  return fragment;
}

function scrollable(element, label) {
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", label);
}

function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.data.length));
    else old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
  before.forEach((node, i) => (i < after.length ? morph(node, after[i]) : node.remove()));
  old.append(...after.slice(before.length));
}
