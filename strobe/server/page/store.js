// Conversations in the browser's IndexedDB; where there is none, as long as the page lasts.

const NAME = "strobe";
const STORE = "conversations";

let database = null; // a promise of the database, null where it cannot be opened
const memory = new Map();

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
    request.onerror = () => reject(request.error);
  });
}

/** Open the database. Returns whether conversations will outlast the page. */
export async function start() {
  try {
    database = await open();
  } catch {
    database = null; // turned off in this browser
  }
  return database !== null;
}

function run(mode, work) {
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORE, mode);
    const request = work(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** All records, the newest first. */
export async function all() {
  const records = database ? await run("readonly", (store) => store.getAll()) : [...memory.values()];
  return records.sort((a, b) => b.updated - a.updated);
}

export async function get(id) {
  return database ? run("readonly", (store) => store.get(id)) : memory.get(id);
}

export async function put(record) {
  if (database) await run("readwrite", (store) => store.put(record));
  else memory.set(record.id, record);
}

export async function remove(id) {
  if (database) await run("readwrite", (store) => store.delete(id));
  else memory.delete(id);
}
