use std::io;
use std::path::{Path, PathBuf};

/// Last folder that `tests/vocabularies.py` writes, and so a sign that it finished.
const COMPLETE: &str = "llama_cpp_python-0.3.36-templates";

/// Folder of llama.cpp's vocabulary tests in the user's cache: `ggml-vocab-NAME.gguf`, texts
/// (`.inp`) and their ids (`.out`).
///
/// # Panics
/// If the folder is missing; the message names the script that fetches it.
pub fn vocabularies() -> PathBuf {
    find_vocabularies().expect("llama.cpp's vocabularies")
}

/// Same as [`vocabularies`], without a panic.
///
/// # Errors
/// The folder is missing; the message names the script that fetches it.
pub(crate) fn find_vocabularies() -> io::Result<PathBuf> {
    let cache = hearthnet_files::cache::directory().map_err(io::Error::other)?;
    find_in(&cache)
}

fn find_in(cache: &Path) -> io::Result<PathBuf> {
    let folder = cache.join("test-models/vocabularies");
    if folder.join(COMPLETE).exists() {
        return Ok(folder);
    }
    let missing = format!(
        "llama.cpp's vocabularies are not in {}: `tests/run` brings them, or `python3 tests/vocabularies.py` alone (Python with pip)",
        folder.display()
    );
    Err(io::Error::new(io::ErrorKind::NotFound, missing))
}

/// Folder of llama.cpp's collection of chat templates: `NAME.jinja`.
///
/// # Panics
/// As [`vocabularies`].
pub fn chat_templates() -> PathBuf {
    vocabularies().join("templates")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_vocabularies_are_an_error_that_names_the_script() {
        let missing = find_in(Path::new("/nowhere")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let said = missing.to_string();
        assert!(said.contains("tests/vocabularies.py"), "{said}");
    }
}
