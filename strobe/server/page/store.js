// Conversations in the browser's IndexedDB; where there is none, as long as the page lasts.

const NAME = "strobe";
const STORE = "conversations";

let opened = open(); // a promise of the database; null after another page has closed it
const memory = new Map();
const channel = new BroadcastChannel(NAME);

/** Call a function whenever another page of this browser has changed what is stored. */
export function onChange(act) {
  channel.addEventListener("message", act);
}

/** Whether conversations outlast the page, as a promise. */
export const kept = opened.then(() => true, () => false); // false: turned off in this browser

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => {
      const database = request.result;
      database.onclose = () => (opened = null);
      database.onversionchange = () => {
        database.close();
        opened = null;
      };
      resolve(database);
    };
    request.onerror = () => reject(request.error);
  });
}

async function run(mode, work) {
  const database = await (opened ??= open());
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORE, mode);
    const request = work(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** All records, the newest first. */
export async function all() {
  const records = (await kept) ? await run("readonly", (store) => store.getAll()) : [...memory.values()];
  return records.sort((a, b) => b.updated - a.updated);
}

/** The record of an id, undefined without one. */
export async function get(id) {
  return (await kept) ? run("readonly", (store) => store.get(id)) : memory.get(id);
}

export async function put(record) {
  if (await kept) await run("readwrite", (store) => store.put(record));
  else memory.set(record.id, record);
  channel.postMessage(record.id);
}

export async function remove(id) {
  if (await kept) await run("readwrite", (store) => store.delete(id));
  else memory.delete(id);
  channel.postMessage(id);
}
