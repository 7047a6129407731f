/* To preload: close() of a file whose path contains $CLOSE_FAILS_FOR reports EIO, as NFS does when the server could not
   write what it had accepted. The descriptor is freed all the same, as Linux frees it. A descriptor that is closed
   once more is noted in the file $CLOSED_TWICE. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int last_failed = -1;

int close(int descriptor)
{
    static int (*real_close)(int);
    if (real_close == NULL)
        real_close = (int (*)(int))dlsym(RTLD_NEXT, "close");

    const char *wanted = getenv("CLOSE_FAILS_FOR");
    const char *notes = getenv("CLOSED_TWICE");
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    int fails = wanted != NULL && length > 0 && strstr(path, wanted) != NULL;

    int result = real_close(descriptor);
    if (result != 0 && descriptor == last_failed && notes != NULL) {
        int file = open(notes, O_WRONLY | O_CREAT | O_APPEND, 0600);
        dprintf(file, "%d\n", descriptor);
        real_close(file);
    }
    if (!fails || result != 0)
        return result;
    last_failed = descriptor;
    errno = EIO;
    return -1;
}
