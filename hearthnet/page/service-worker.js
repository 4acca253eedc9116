// Keeps a copy of the page's files, so that the installed page opens, shows its conversations and
// says that the node is away while the node is not running. Calls are never cached.

const CACHE = 'hearthnet-page';
const FILES = ['/', '/style.css', '/app.js', '/api.js', '/chat.js', '/dom.js', '/markdown.js',
  '/members.js', '/mesh.js', '/store.js', '/icon.svg', '/manifest.webmanifest'];

self.addEventListener('install', (event) => {
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(FILES)));
});

self.addEventListener('fetch', (event) => {
  const url = new URL(event.request.url);
  if (event.request.method !== 'GET' || url.origin !== location.origin
    || !FILES.includes(url.pathname)) return;
  event.respondWith(newest(event.request, url.pathname));
});

// The node's file; the copy if the node does not answer.
async function newest(request, path) {
  const cache = await caches.open(CACHE);
  try {
    const response = await fetch(request);
    if (response.ok) await cache.put(path, response.clone());
    return response;
  } catch (error) {
    const copy = await cache.match(path);
    if (copy) return copy;
    throw error;
  }
}
