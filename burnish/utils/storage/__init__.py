"""Files and folders at places that a URL names, read, copied and written through fsspec: `places`, `folders`, `cache`."""

from burnish.utils.storage.cache import cache_folder, localize
from burnish.utils.storage.folders import download_folder, upload_folder
from burnish.utils.storage.places import (
    exists,
    files_in,
    filesystem,
    identity,
    is_folder,
    is_remote,
    join,
    list_files,
    list_folders,
    matching,
    name_of,
    open_file,
    read_text,
    remove_folder,
    shown,
    write_text,
)

__all__ = [
    "cache_folder", "download_folder", "exists", "files_in", "filesystem", "identity", "is_folder", "is_remote", "join",
    "list_files", "list_folders", "localize", "matching", "name_of", "open_file", "read_text", "remove_folder", "shown",
    "upload_folder", "write_text",
]  # fmt: skip
