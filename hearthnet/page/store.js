// Conversations, in this browser only (IndexedDB). If the browser keeps nothing, as in a private
// window, they last as long as the page.

let opened;

function database() {
  opened ??= new Promise((resolve) => {
    const request = indexedDB.open('hearthnet', 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore('conversations', { keyPath: 'id' });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  }).catch(() => null);
  return opened;
}

async function run(mode, work) {
  const db = await database();
  if (!db) return undefined;
  const transaction = db.transaction('conversations', mode);
  const request = work(transaction.objectStore('conversations'));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = () => reject(transaction.error);
    transaction.onabort = () => reject(transaction.error);
  });
}

// All conversations, the newest first.
export async function all() {
  const found = await run('readonly', (store) => store.getAll()) ?? [];
  return found.sort((a, b) => b.changed - a.changed);
}

export const put = (conversation) => run('readwrite', (store) => store.put(conversation));
export const remove = (id) => run('readwrite', (store) => store.delete(id));
export const clear = () => run('readwrite', (store) => store.clear());
