//! Files of the page, part of the program. No script is generated or fetched from elsewhere.

use hearthnet_http::Page;

macro_rules! files {
    ($($path:literal $file:literal $kind:literal)+) => {
        [$(Page {
            path: $path,
            kind: $kind,
            bytes: include_bytes!(concat!("../../page/", $file)),
        }),+]
    };
}

/// Files by the path of their URL.
pub(crate) static FILES: [Page; 13] = files! {
    "/" "index.html" "text/html; charset=utf-8"
    "/style.css" "style.css" "text/css; charset=utf-8"
    "/app.js" "app.js" "text/javascript; charset=utf-8"
    "/api.js" "api.js" "text/javascript; charset=utf-8"
    "/chat.js" "chat.js" "text/javascript; charset=utf-8"
    "/dom.js" "dom.js" "text/javascript; charset=utf-8"
    "/markdown.js" "markdown.js" "text/javascript; charset=utf-8"
    "/members.js" "members.js" "text/javascript; charset=utf-8"
    "/mesh.js" "mesh.js" "text/javascript; charset=utf-8"
    "/store.js" "store.js" "text/javascript; charset=utf-8"
    "/service-worker.js" "service-worker.js" "text/javascript; charset=utf-8"
    "/icon.svg" "icon.svg" "image/svg+xml"
    "/manifest.webmanifest" "manifest.webmanifest" "application/manifest+json"
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest size of all files together, in bytes.
    const MOST_BYTES: usize = 150_000;

    fn text(page: &Page) -> &str {
        std::str::from_utf8(page.bytes).unwrap()
    }

    #[test]
    fn the_page_is_small_and_names_no_other_site() {
        let bytes: usize = FILES.iter().map(|page| page.bytes.len()).sum();
        assert!(bytes <= MOST_BYTES, "{bytes}");
        for page in &FILES {
            // Names of XML are no addresses.
            let text = text(page).replace("http://www.w3.org/2000/svg", "");
            for (at, _) in text.match_indices("://") {
                let after = &text[at + 3..];
                assert!(
                    !after.starts_with(|c: char| c.is_ascii_alphanumeric()),
                    "{}",
                    page.path
                );
            }
        }
    }

    #[test]
    fn the_page_parses_no_text_as_html_or_script() {
        let sinks = [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
            "DOMParser",
            "setHTML",
            "javascript:",
        ];
        for page in &FILES {
            for sink in sinks {
                assert!(!text(page).contains(sink), "{sink} in {}", page.path);
            }
        }
        let html = text(&FILES[0]);
        assert!(!html.contains("<style") && !html.contains(" style="));
        let handlers = html
            .split_whitespace()
            .filter(|word| word.starts_with("on"));
        assert!(!handlers.into_iter().any(|word| word.contains('=')));
    }

    #[test]
    fn every_file_that_the_page_names_exists() {
        for page in &FILES {
            for (before, after) in [("from \"./", '"'), ("href=\"/", '"'), ("src=\"/", '"')] {
                for part in text(page).split(before).skip(1) {
                    let name = format!("/{}", part.split(after).next().unwrap());
                    assert!(FILES.iter().any(|page| page.path == name), "{name}");
                }
            }
        }
    }
}
