use std::path::PathBuf;

/// What `tests/vocabularies.py` writes last.
const COMPLETE: &str = "llama_cpp_python-0.3.36-templates";

/// The folder of llama.cpp's own vocabulary tests in the user's cache: `ggml-vocab-NAME.gguf`, texts
/// (`.inp`) and their ids (`.out`).
///
/// # Panics
/// When they are not there, with what brings them.
pub fn vocabularies() -> PathBuf {
    let folder = hearthnet_model::cache::directory()
        .expect("a cache directory")
        .join("test-models/vocabularies");
    assert!(
        folder.join(COMPLETE).exists(),
        "llama.cpp's vocabularies are not in {}: `tests/run` brings them, or `python3 tests/vocabularies.py` alone (Python with pip)",
        folder.display()
    );
    folder
}

/// The folder of llama.cpp's collection of chat templates: `NAME.jinja`.
///
/// # Panics
/// When they are not there, with what brings them.
pub fn chat_templates() -> PathBuf {
    vocabularies().join("templates")
}
