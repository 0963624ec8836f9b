/* Where every generated stub ends, so that a stray call can be seen. */
#pragma once

int stub_called(const char *name, int result);
