// Changes the document only where it differs: an element that is replaced would lose the user's focus
// and selection.

export const byId = (id) => document.getElementById(id);

/** A new element with attributes, and children that are elements or text. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

export function attribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/**
 * Makes the children of `parent` those of `items`, in their order: each is identified by `key(item)`,
 * made once by `make(item)` and updated by `update(child, item)`.
 */
export function each(parent, items, key, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    const child = known.get(name) ?? make(item);
    known.delete(name);
    if (child.dataset.key !== name) child.dataset.key = name;
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const child of known.values()) child.remove();
}
